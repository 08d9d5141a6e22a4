"""The settings of a run, section by section: frozen pydantic models. No torch in here; `config.py` reads files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from relibra.rl.config.presets import PRESETS


class Section(BaseModel):
    """A group of settings; unknown keys are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RunSettings(Section):
    """What the run is called and how long it goes on."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder; a number is added when it exists."""
    folder: Path = Path("runs")
    """Folder that holds run folders."""
    seed: int = Field(0, ge=0)
    """Everything random follows from it: weights, prompts, samples."""
    steps: int = Field(60, ge=0)
    """RL steps: rollout, reward, recompute, plan, update, weight sync."""


class TaskSettings(Section):
    """What the policy is trained to do."""

    name: Literal["arithmetic", "strings", "prompts"] = "arithmetic"
    """"arithmetic": chains of additions; "strings": sort or reverse letters; "prompts": your own file."""
    max_terms: int = Field(12, ge=2, le=64)
    """arithmetic: longest chain."""
    continue_probability: float = Field(0.72, ge=0, lt=1)
    """arithmetic, strings: chance that a chain or a word goes on after each term or letter: the tail of the lengths."""
    tail_exponent: float = Field(0.0, ge=0)
    """arithmetic: above 0, lengths follow a power law instead: P(more than n terms) = (2 / (n + 1)) ^ tail_exponent."""
    operation: Literal["sort", "reverse"] = "reverse"
    """strings: what to do with the letters."""
    max_letters: int = Field(12, ge=2, le=64)
    """strings: longest word."""
    file: Path | None = None
    """prompts: a .jsonl or .parquet file with one prompt per row."""
    evaluation_file: Path | None = None
    """prompts: rows for evaluation; none: the last rows of `file`, which are then left out of training."""
    prompt_column: str = "prompt"
    """prompts: column with the text, or with a list of chat messages."""
    answer_column: str = "answer"
    """prompts: column with the right answer, for the rewards "exact" and "maths"."""
    reward: str = "maths"
    """prompts: "exact", "maths", or your function as `module:function`; it is called as function(response, row)."""


class ModelSettings(Section):
    """The policy: a model of your own, or a tiny Qwen3-MoE-shaped one, built from these sizes."""

    path: str = ""
    """Folder of a `transformers` model, or its name on the hub; empty: the tiny one, whose sizes follow."""
    hidden_size: int = Field(64, ge=8, multiple_of=8)
    """Width; experts are half as wide inside."""
    num_layers: int = Field(3, ge=1)
    """Decoder layers, all of them MoE."""
    num_heads: int = Field(4, ge=2, multiple_of=2)
    """Attention heads; half as many for keys and values."""
    num_experts: int = Field(16, ge=0)
    """Routed experts per layer; 0: a dense model."""
    experts_per_token: int = Field(2, ge=1)
    """Choices per token, K."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computing. Trained weights, gradients and optimizer states are kept in float32 either way."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each layer for the backward pass, and compute the rest again."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelSettings:
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 x num_heads {self.num_heads}")
        return self


class WarmupSettings(Section):
    """Supervised steps before RL, on demonstrations that slip now and then; for tasks that can demonstrate."""

    steps: int = Field(320, ge=0)
    """Optimizer steps."""
    batch: int = Field(128, ge=1)
    """Demonstrations per step, over all ranks."""
    learning_rate: float = Field(5e-3, gt=0)
    """AdamW's at its height: a ramp over the first 20 steps, then a linear fall to a tenth."""
    slip: float = Field(0.3, ge=0, le=1)
    """Chance, at the end, of a mistake at each link of a demonstration; RL has to unlearn it. The first half of the
    warm-up is without slips, then the chance grows evenly."""


class RolloutSettings(Section):
    """How responses are sampled."""

    prompts_per_step: int = Field(32, ge=1)
    """Prompts per step, over all ranks; times `responses_per_prompt` they are the responses under way at once."""
    responses_per_prompt: int = Field(8, ge=1)
    """Responses to each prompt: the group that an advantage may be measured in."""
    max_response: int = Field(80, ge=1)
    """Longest response, in tokens."""
    window: int = Field(0, ge=0)
    """Tokens that a step adds to a response at most (T-PPO); unfinished ones go on in the next. 0: max_response."""
    refill: bool = False
    """Places of responses that end inside a window take fresh ones at once: a step is at most `window` decode steps."""
    max_prompt: int = Field(1024, ge=1)
    """Longest prompt, in tokens; a longer one ends the run with an error that names it."""
    max_batch: int = Field(256, ge=1)
    """Responses that one rank decodes at once; where it has more, they take the places of finished ones."""
    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    """Who samples: a full copy of the policy in every process, or a server of that kind at `url`."""
    url: str = ""
    """sglang, vllm: the server's address, as in http://127.0.0.1:30000; it returns log-probs and routed experts."""
    server_weights: Path | None = None
    """sglang, vllm: folder that trainer and server see under the same path: new weights go through it."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling; log-probs are those of the tempered policy, in rollout and in training."""

    @property
    def responses_per_step(self) -> int:
        """Responses sampled at once, over all ranks."""
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def window_tokens(self) -> int:
        """Tokens that a step adds to a response at most."""
        return self.window or self.max_response

    @property
    def max_windows(self) -> int:
        """Windows of a response at most; with `refill` the first may be shorter than others, which makes one more."""
        return self.max_response // self.window_tokens + self.refill

    @model_validator(mode="after")
    def _parts_fit(self) -> RolloutSettings:
        if self.engine != "embedded" and not (self.url and self.server_weights):
            raise ValueError(f"engine {self.engine!r} needs url and server_weights: the server, and a folder both see")
        if self.refill and self.engine != "embedded":
            raise ValueError(
                f"refill needs engine 'embedded', and it is {self.engine!r}: a server does not count decode steps; set "
                "refill=false"
            )
        if self.max_response % self.window_tokens:
            longer = self.max_response + -self.max_response % self.window_tokens
            fitting = max(w for w in range(1, self.window_tokens + 1) if self.max_response % w == 0)
            raise ValueError(
                f"window {self.window} does not divide max_response {self.max_response}: a response has a whole number "
                f"of windows; set rollout.max_response to {longer} or the window to {fitting}"
            )
        return self


class AlgorithmSettings(Section):
    """What is learned from a response: advantages, ratios, clips, corrections. A preset sets those you leave out."""

    preset: Literal["ppo", "tppo", "grpo", "dapo", "gspo"] = "dapo"
    """Where the defaults of this section come from; see docs/training.md for what each sets."""
    advantage: Literal["gae", "group"] = "group"
    """"gae": rewards minus what a value model expects, token by token; "group": minus the mean of its group."""
    gamma: float = Field(1.0, gt=0, le=1)
    """gae: discount per token."""
    lambda_mode: Literal["fixed", "length_adaptive"] = "fixed"
    """gae: "length_adaptive" is 1 - 1 / (lambda_alpha x length), at least lambda_policy."""
    lambda_policy: float = Field(0.95, ge=0, le=1)
    """gae: lambda of the policy's advantages, or its floor."""
    lambda_alpha: float = Field(0.05, gt=0)
    """gae: share of a response that the trace of an adaptive lambda spans."""
    bootstrap: Literal["hold", "value"] = "hold"
    """gae: value after the last token of an unfinished response: that before it (T-PPO), or the value model's."""
    tail_drop: int = Field(8, ge=0)
    """gae: last tokens of an unfinished response that the policy does not train on."""
    whiten: bool = True
    """gae: shift and scale the advantages of a step to mean 0 and standard deviation 1."""
    advantage_clamp: float = Field(10.0, gt=0)
    """gae: advantages are kept within plus and minus this, after whitening."""
    divide_by_std: bool = True
    """group: divide by the standard deviation of the group; false is Dr. GRPO."""
    group_filter: Literal["off", "mixed"] = "off"
    """"mixed": train only on groups whose finished responses differ in reward."""
    overlong_buffer: int = Field(0, ge=0)
    """Within this many tokens of max_response the reward falls, by 1 at the end (DAPO); 0: off."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio of each token, or one per response (GSPO)."""
    aggregate: Literal["token", "token_over_step", "response", "constant"] = "token"
    """Loss per mini-batch: mean over its tokens; the same with the step's mean number of tokens; mean over responses of
    their means; or sum over responses of their sums / max_response, per response."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip of the probability ratio is 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """Upper clip of the probability ratio is 1 + clip_high."""
    dual_clip: float = Field(0.0, ge=0)
    """Largest weight of a token with negative advantage, above 1; 0: unlimited."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the divergence from the policy as it was after the warm-up; 0: no reference policy is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that divergence is estimated from sampled tokens."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    positive_coefficient: float = Field(0.0, ge=0)
    """Weight of the language-model loss on finished responses with a positive reward (VAPO)."""
    replay: Literal["off", "R2", "R3"] = "R3"
    """Experts in training: chosen anew; as in the recompute pass (R2); as in the rollout (R3, arXiv 2510.11370)."""
    correction: Literal["off", "tis", "sequence_tis", "icepop", "mis"] = "off"
    """What a difference between sampler and trainer does to a token's weight: truncated importance sampling per token
    or per response, or weight 0 outside of correction_low..correction_high."""
    correction_low: float = Field(0.5, ge=0, le=1)
    """icepop, mis: smallest ratio of trainer to sampler that trains."""
    correction_high: float = Field(2.0, ge=1)
    """Largest ratio of trainer to sampler, cut there (tis) or masked beyond it (icepop, mis)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, settings: Any) -> Any:
        """Put the values of the preset where none was given."""
        if not isinstance(settings, dict):
            return settings
        return {**PRESETS.get(settings.get("preset", "dapo"), {}), **settings}

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmSettings:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1, or 0 for none")
        return self


class UpdateSettings(Section):
    """How the optimizers step."""

    learning_rate: float = Field(2e-4, gt=0)
    """AdamW's for the policy."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rates rise from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    mini_batches: int = Field(8, ge=1)
    """Optimizer steps per rollout batch and epoch."""
    epochs: int = Field(1, ge=1)
    """Times that a rollout batch is trained on."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens that one rank feeds at once, in the warm-up too; a longer response goes alone."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class CriticSettings(Section):
    """The value model of the "gae" algorithms: the policy's weights at the start, with a value head."""

    learning_rate: float = Field(1e-3, gt=0)
    """AdamW's for the value model."""
    warmup_steps: int = Field(0, ge=0)
    """First RL steps in which only the value model learns."""
    clip_low: float = Field(0.5, gt=0)
    """A new value more than this below the one at rollout gets no credit for going on."""
    clip_high: float = Field(0.6, gt=0)
    """The same above it."""
    min_finished: int = Field(1, ge=1)
    """Finished responses are collected over steps until there are so many to train the value model on."""
    explained_variance_gate: float | None = None
    """Unfinished responses train the policy only while the value model explains more than this share of the variance
    of returns; none: always."""


class PlanSettings(Section):
    """Balanced expert parallelism: what may be planned from the recorded routes. Needs replay, and several ranks."""

    balancer: str = "relibra"
    """Who plans: a name that `relibra compare` lists, or "static": every expert stays where it is, all_to_all."""
    slots: int = Field(1, ge=0, le=64)
    """Places per rank for copies of busy experts."""
    move_homes: bool = True
    """May experts move between ranks at the boundary of a step."""
    pack: bool = True
    """May responses change rank and micro-batch inside their mini-batch."""
    tolerance: float = Field(0.02, ge=0, le=10)
    """Accepted load of the busiest rank above the lowest reachable one; larger means fewer copies."""
    sums: Literal["fast", "canonical"] = "fast"
    """"canonical": the same bits under every plan of one schedule (responses are then not packed), at a price."""


class ParallelSettings(Section):
    """Processes of the run; expert parallelism and FSDP both span all of them."""

    ranks: int = Field(2, ge=1)
    """Processes; they must divide the experts. `torchrun` overrides it."""
    threads_per_rank: int = Field(1, ge=1)
    """CPU threads of each process."""
    timeout_seconds: float = Field(120.0, gt=0)
    """How long a rank waits for its peers in one collective before the run ends with an error."""


class CheckpointSettings(Section):
    """What a run that was killed goes on from."""

    every: int = Field(10, ge=0)
    """RL steps between checkpoints; 0: none."""
    keep: int = Field(2, ge=1)
    """Latest checkpoints that are kept."""


class EvaluationSettings(Section):
    """Held-out prompts, answered by the policy now and then."""

    every: int = Field(0, ge=0)
    """RL steps between evaluations; 0: none."""
    prompts: int = Field(64, ge=1)
    """Prompts of an evaluation."""
    stop_at: float | None = None
    """The run ends when an evaluation reaches this mean reward; none: after `run.steps`."""
