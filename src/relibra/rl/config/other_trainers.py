"""Settings of other trainers: what they are called here, or what stands here for those that are not there yet."""

from __future__ import annotations

from collections.abc import Mapping

CALLED_HERE: Mapping[str, str] = {
    "lr": "update.learning_rate", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "beta": "algorithm.kl_coefficient", "kl_coef": "algorithm.kl_coefficient",
    "n": "rollout.responses_per_prompt", "num_generations": "rollout.responses_per_prompt",
    "max_completion_length": "rollout.max_response", "max_new_tokens": "rollout.max_response",
    "max_prompt_length": "rollout.max_prompt", "gradient_checkpointing": "update.activations",
    "lora_rank": "lora.rank", "lora_alpha": "lora.alpha",
    "max_steps": "run.steps", "save_steps": "checkpoint.every", "ppo_epochs": "update.epochs",
}  # fmt: skip
_CUT = "responses cut at rollout.max_response are trained on; algorithm.overlong_buffer lowers their reward"
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("top_p", "top_k", "min_p"), "rollout.temperature is all that shapes sampling"),
    **dict.fromkeys(("max_turns", "max_assistant_turns", "multi_turn"), "a response is one turn, without tools"),
    "use_peft": "lora.rank above 0 trains adapters",
    **dict.fromkeys(("overlong_filter", "mask_truncated_completions"), _CUT),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), "parallel.ranks shards all layers"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "update.lr_warmup_steps, then the rate is constant"),
    **dict.fromkeys(("report_to", "use_wandb"), "metrics.jsonl and tensorboard/ of the run have all numbers"),
    "evaluation.temperature": "evaluations sample at rollout.temperature",
    "evaluation.responses_per_prompt": "an evaluation samples one response per prompt",
    "evaluation.max_response": "evaluations have rollout.max_response",
}
"""By key, or section.key."""
