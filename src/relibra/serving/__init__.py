"""Serve a Mixture-of-Experts model with attention on some processes and experts on others (MegaScale-Infer).

In: a model folder and a `WorkerLayout`. Out: answers over HTTP, with log-probs and the routes of every token. Start-up:
`launch.py`. A request: `server/__init__.py`, then `roles/attention_worker.py`, `roles/remote_experts.py` (one layer of
one micro-batch, from dispatch to combine) and `roles/expert_worker.py`. Importing these loads torch.
"""

from relibra.environment import silence_torchao

silence_torchao()
