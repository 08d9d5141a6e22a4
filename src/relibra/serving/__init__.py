"""Serve a Mixture-of-Experts model with attention on some processes and experts on others (MegaScale-Infer).

In: a model folder and a `WorkerLayout`. Out: answers over HTTP, with log-probs and the routes of every token. Start-up:
`launch.py`. A request: `server/__init__.py`, then over `channel.py` to a process of `worker_process.py`: there
`roles/attention_worker.py`, `engine/engine.py` (batching, cache, sampling), `roles/remote_experts.py` (one layer of one
micro-batch, from dispatch to combine), and in another process `roles/expert_worker.py`. Importing these loads torch.
"""

from relibra.environment import silence_torchao

silence_torchao()
