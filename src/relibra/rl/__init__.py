"""RL post-training with recorded routes. In: `RunConfig`. Out: a run folder with metrics, routes and the policy.

`config` -> `run` (processes, files) -> `trainer.py` (a run on one rank) -> `step.py` (one RL step, start here), which
uses `rollout` -> `batch` -> `update`, with formulas from `algorithms`, models from `model`, prompts from `tasks`.
"""

from relibra.environment import silence_torchao

silence_torchao()
