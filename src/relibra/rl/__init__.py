"""RL post-training with recorded routes. In: `RunConfig`. Out: a run folder with metrics, routes and the policy.

`config` -> `run` (processes, files) -> `trainer.py` (a run on one rank) -> `step.py` (one RL step, start here), which
uses `rollout` -> `batch` -> `update`, with formulas from `algorithms`, models from `model`, prompts from `tasks`.
"""

import logging

# transformers imports torchao where it is installed, which logs what it lacks on this machine, and how it calls torch.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)
