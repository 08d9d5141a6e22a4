"""Settings of a run by section; defaults are for a model of your own, `defaults.py` has those of the built-in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from relibra.cluster import Cluster, Dispatch
from relibra.planning.budget import MOST_SLOTS, MOST_TOLERANCE, PEER_SLOTS, Budget
from relibra.planning.costs.expert_shape import GradientWire
from relibra.rl.config.rollout_settings import MAX_LENGTH, RolloutSettings, Section

Preset = Literal["ppo", "tppo", "grpo", "dapo", "gspo"]
Aggregate = Literal["token", "token_over_step", "response", "constant"]
Estimator = Literal["k1", "k2", "k3", "k3+"]
LONGEST = 1 << 24
"""Most steps of anything."""
NO_EXPERTS = "a model without experts has nothing to balance, so plan.* has no effect"
"""End of the messages that refuse replay for a model without experts."""
LARGE = 1e9
"""A limit of the algorithm that is as good as none."""


class RunSettings(Section):
    """Name, seed and length of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder; if it exists, -2, -3, ... is appended."""
    folder: Path = Path("runs")
    """Folder that contains run folders."""
    seed: int = Field(0, ge=0, le=1 << 53)
    """Seed of built-in weights, prompt order and sampling."""
    steps: int = Field(60, ge=0, le=LONGEST)
    """Number of RL steps (rollout, reward, plan, recompute, update, weight sync)."""


class TaskSettings(Section):
    """Prompts and rewards."""

    name: Literal["arithmetic", "strings", "prompts"] = "arithmetic"
    """"arithmetic": chains of additions; "strings": reverse the letters of a word; "prompts": your own file."""
    max_terms: int = Field(12, ge=2, le=64)
    """arithmetic: most terms of a sum; strings: most letters of a word."""
    continue_probability: float = Field(0.72, ge=0, lt=1)
    """arithmetic, strings: probability of one more term or letter; larger values give a longer tail of lengths."""
    tail_exponent: float = Field(0.0, ge=0, le=100)
    """arithmetic: above 0, lengths follow a power law: P(more than n terms) = (2 / (n + 1)) ^ tail_exponent."""
    file: Path | None = None
    """prompts: a .jsonl or .parquet file with one prompt per row."""
    evaluation_file: Path | None = None
    """prompts: rows for evaluation; none: the last rows of `file`, which are then not trained on."""
    prompt_column: str = "prompt"
    """prompts: column with the text or a list of chat messages."""
    answer_column: str = "answer"
    """prompts: column with the correct answer, for the rewards "exact" and "maths"."""
    prompt_format: Literal["chat", "text"] = "chat"
    """"chat": a text is a user message in the chat template of the model, if it has one; "text": fed as it is."""
    add_special_tokens: bool = True
    """Begin a text that is fed as it is with the start tokens that the tokenizer adds, unless it begins with them."""
    template_variables: dict[str, bool | int | float | str | list[Any] | dict[str, Any]] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking = false}; `chat_template_kwargs` of a row win."""
    continue_final_message: bool = False
    """prompts: responses continue an assistant's message at the end of a prompt; false: such a prompt is refused."""
    reward: str = "maths"
    """prompts: "exact", "maths", or your own `module:function`, called as function(response, row)."""


class ModelSettings(Section):
    """The policy: your own model (path), or a built-in small Qwen3-MoE of these sizes."""

    path: str = ""
    """Folder of a `transformers` model; or the name of one that was downloaded before; or hub:owner/name, which is
    downloaded. Empty: the built-in model, whose sizes follow."""
    trust_remote_code: bool = False
    """Run Python files that the model's folder or hub page brings along. Only for code that you have read."""
    hidden_size: int = Field(64, ge=8, le=1 << 16, multiple_of=8)
    """Hidden size."""
    expert_width: int = Field(0, ge=0, le=1 << 17, multiple_of=8)
    """Inner width of an expert; 0: half of the hidden size."""
    num_layers: int = Field(3, ge=1, le=1 << 10)
    """Decoder layers; all are MoE layers."""
    num_experts: int = Field(16, ge=0, le=1 << 12)
    """Routed experts per layer; 0: a dense model."""
    experts_per_token: int = Field(2, ge=1, le=1 << 8)
    """Experts per token (top-k)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of forward and backward passes; trained weights, gradients and optimizer states are always float32."""

    @property
    def source(self) -> str:
        """What transformers loads: `path` without `hub:`, and with `~` expanded."""
        name = self.path.removeprefix("hub:")
        return str(Path(name).expanduser()) if name.startswith("~") else name


class LoraSettings(Section):
    """Low-rank adapters (LoRA) of attention, dense layers and experts are trained, and all other weights frozen."""

    rank: int = Field(0, ge=0, le=1 << 10, multiple_of=8)
    """Rank of the adapters; 0: all weights are trained. Adapters learn at about 10 times the rate of whole weights:
    set update.learning_rate=1e-5."""
    alpha: float = Field(32.0, gt=0, le=LARGE)
    """An adapter adds alpha / rank times its product."""


class WarmupSettings(Section):
    """Supervised steps before RL on demonstrations with random errors; built-in tasks only."""

    steps: int = Field(0, ge=0, le=LONGEST)
    """Optimizer steps."""
    batch: int = Field(128, ge=1, le=1 << 20)
    """Demonstrations per step, summed over ranks."""
    learning_rate: float = Field(5e-3, gt=0, le=10)
    """Peak learning rate of AdamW: rises linearly over 20 steps, then falls linearly to a tenth."""
    error_rate: float = Field(0.3, ge=0, le=1)
    """Probability of an error in each link or letter of a demonstration, reached at the last step; 0 in the first half
    of the warm-up. RL then removes these errors."""


class AlgorithmSettings(Section):
    """Advantages, probability ratios, clips and corrections. The preset gives the values that you do not set."""

    preset: Preset = "dapo"
    """Published algorithm whose values are the defaults of this section; table in docs/training.md. "ppo" and "tppo"
    have a value model, the others compare the responses to a prompt."""
    lambda_policy: Annotated[float, Field(ge=0, le=1)] | Literal["length_adaptive"] = 0.95
    """ppo, tppo: lambda of policy advantages; "length_adaptive": 1 - 1 / (0.05 x length), at least 0.95 (VAPO)."""
    tail_drop: int = Field(8, ge=0, le=MAX_LENGTH)
    """ppo, tppo: last tokens of an unfinished response that do not train the policy. Preset tppo: a quarter of the
    window, at most 8, unless given."""
    whiten: bool = True
    """ppo, tppo: normalise the advantages of a step to mean 0 and standard deviation 1."""
    divide_by_std: bool = True
    """grpo, dapo, gspo: divide by the standard deviation of the group's rewards; false is Dr. GRPO."""
    group_filter: Literal["off", "mixed"] = "off"
    """"mixed": train only on groups whose finished responses differ in reward (DAPO)."""
    overlong_buffer: int = Field(0, ge=0, le=MAX_LENGTH)
    """Tokens before max_response over which the reward falls linearly, by 1 at max_response (DAPO); 0: off."""
    loss: str = "dapo"
    """Policy loss: that of a preset (a probability ratio per token; gspo: one per response), or your own
    `module:function`, called as function(inputs) (docs/extending.md)."""
    aggregate: Aggregate = "token"
    """Mean of token losses in a mini-batch. "token": over its tokens; "token_over_step": over the step's mean number of
    tokens per mini-batch; "response": over means of responses; "constant": over sums / max_response (Dr. GRPO)."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0, le=LARGE)
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: float = Field(0.0, ge=0, le=LARGE)
    """Cap of the ratio of tokens with negative advantage: a number above 1, or 0 for none."""
    kl_coefficient: float = Field(0.0, ge=0, le=1e3)
    """Weight of the KL divergence from the policy before the first RL step; 0: no reference policy in memory."""
    kl_estimator: Estimator = "k3"
    """Estimator of that divergence from sampled tokens; "k3+" is k3 with an unbiased gradient, as in verl."""
    entropy_coefficient: float = Field(0.0, ge=0, le=1e3)
    """Weight of the entropy bonus."""
    replay: Literal["off", "R2", "R3"] = "R3"
    """Experts in training: the router's; of the recompute pass (R2); of the rollout (R3, arXiv 2510.11370)."""
    old_log_probs: Literal["recompute", "skip_first", "sampler"] = "skip_first"
    """Log-probs before the update, to which the ratio compares. "recompute": of a forward pass. Else those of the first
    mini-batch are the update's own (ratio 1); those of later ones are of a forward pass ("skip_first"), or the
    sampler's, if the first mini-batch passes the check of update.on_mismatch ("sampler")."""
    correction: Literal["off", "tis", "sequence_tis", "icepop", "mis"] = "off"
    """Token weights that correct the mismatch of sampler and trainer, from their ratio. It is truncated at 2 per token
    (tis) or response (sequence_tis); icepop: the ratio inside 0.5..5, else 0; mis: 1 inside 0.5..2, else 0."""

    @property
    def advantage(self) -> Literal["gae", "group"]:
        """Advantages by a value model (generalized advantage estimation), or within the group of a prompt."""
        return "gae" if self.preset in ("ppo", "tppo") else "group"


class UpdateSettings(Section):
    """Optimizer steps of policy and value model."""

    learning_rate: float = Field(1e-6, gt=0, le=10)
    """Learning rate of AdamW for the policy."""
    lr_warmup_steps: int = Field(0, ge=0, le=LONGEST)
    """Optimizer steps over which both learning rates rise linearly from 0; constant after that."""
    mini_batches: int = Field(8, ge=1, le=1 << 20)
    """Mini-batches, and so optimizer steps, per RL step and epoch."""
    epochs: int = Field(1, ge=1, le=1 << 10)
    """Passes over the responses of a step."""
    micro_batch_tokens: int = Field(2048, ge=0, le=1 << 30)
    """Most tokens of a rank's micro-batch; a longer response is one by itself. 0: as many as one, two, four or
    eight of the longest responses have, whichever fits and is fastest by the estimate at the start."""
    activations: Literal["recompute", "host", "keep", "plan"] = "recompute"
    """Of the forward pass, for the backward pass: "recompute" saves only the input of each layer, "host" keeps these
    inputs in host memory, "keep" saves all: more memory, less time. "plan" saves what the device memory holds, layer by
    layer, by the routes of the first step. They change no bit."""
    shared_prompts: bool = True
    """A micro-batch holds the prompt of a group once, and each response sees it and itself. Off, with a warning, where
    the attention of the model does not allow it. The same up to the order of sums."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW with moments in float32, or in 8 bits (torchao), which take a quarter of the memory and round."""
    offload: Literal["off", "moments", "all", "plan"] = "off"
    """What is in host memory when it is not used: "moments" of AdamW between optimizer steps, and value model and
    reference policy outside of their stages; "all": the policy too, while a server samples. "plan": "off" or
    "moments", whichever fits and is faster by the estimate at the start. Changes no bit."""
    max_grad_norm: float = Field(1.0, gt=0, le=LARGE)
    """Largest global gradient norm; larger gradients are scaled down to it."""
    max_mismatch: float | None = Field(None, gt=0, le=LARGE)
    """Largest mean difference of the log-probs of trainer and sampler before the first update (log_ratio_mean_abs);
    a larger one ends the run. None: 0.005 in float32; 0.05 in bfloat16, and with servers of your own; both divided by
    a rollout.temperature below 1."""
    on_mismatch: Literal["fall_back", "stop", "warn"] | None = None
    """What follows if log-ratios of trainer and sampler in the first mini-batch, by age of the weights, position or
    expert, are unlike those of earlier steps: "fall_back" computes old log-probs in a pass (old_log_probs=sampler),
    "stop" ends the run, "warn" goes on. None: fall_back with old_log_probs=sampler, else warn."""


class CriticSettings(Section):
    """Value model of advantage "gae": the policy's initial weights with a value head."""

    learning_rate: float = Field(1e-5, gt=0, le=10)
    """Learning rate of AdamW for the value model."""
    pretrain_steps: int = Field(0, ge=0, le=LONGEST)
    """First RL steps that train only the value model. Presets ppo and tppo: 10, or more if a response has more
    windows, unless given."""
    min_finished: int = Field(1, ge=1, le=1 << 30)
    """Fewest finished responses for a value update; fewer are kept for later steps. Presets ppo and tppo: 64, or all
    of a step if it has fewer, unless given."""
    explained_variance_gate: float | None = Field(None, ge=-LARGE, le=1)
    """Unfinished responses train the policy only while the value model explains more than this share of the variance
    of returns; "off": no gate. Presets ppo and tppo: 0.0 unless given."""

    @field_validator("explained_variance_gate", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        return None if value == "off" else value


class PlanSettings(Section):
    """Balanced expert parallelism, planned from the recorded routes, or live. Needs at least 2 ranks; plans replay."""

    balancer: str = "relibra"
    """Balancer: a name from `relibra compare`, or "static": plain all-to-all, no expert moves. "live": replicas are
    decided in each layer from the routes of its micro-batch, without a plan; the only one without replay. Or your own
    `module:function`, called as function(request) (docs/extending.md)."""
    cluster: str = "auto"
    """Machine that plans are priced for: a preset (`relibra plan --help`), a file of `relibra calibrate` (.toml),
    "measure" (a short calibration, kept per machine), or "auto": the preset of this GPU, and "laptop" on a CPU."""
    dispatch: Dispatch | None = None
    """How tokens reach other nodes: "flat", once per rank that computes them; "hierarchical", once per node,
    forwarded there. None: as `cluster` has it, flat for presets. Flat in any case with canonical sums."""
    slots: int | None = Field(None, ge=0, le=MOST_SLOTS)
    """Most slots per rank for replicas, copies of busy experts; none: as many as pay. Peers and "live" take 2."""
    memory_gib: float | None = Field(None, ge=0, le=1 << 20)
    """Most memory per rank for resident slots, whose replicas stay over micro-batches, with weights and float32
    gradients; none: what the model leaves of the device memory of `cluster`, by its sizes. 0: one buffer for all
    layers."""
    move_homes: bool = True
    """Allow experts to move between ranks between steps."""
    pack: bool = True
    """Allow responses to change rank and micro-batch inside their mini-batch."""
    tolerance: float = Field(Budget.tolerance, ge=0, le=MOST_TOLERANCE)
    """Accepted excess of the busiest rank's load over the lowest possible (0.01 = 1 %); larger means fewer copies."""
    steps_served: int = Field(Budget.steps_served, ge=1, le=LONGEST)
    """Steps over which the time of moving an expert to a new home is spread: how long routes stay alike."""
    lasting: bool = False
    """Keep homes and resident replicas, which are chosen from the step before while that one trains; plan only the
    split of token-slots, or the whole step if no earlier plan has resident slots, or if that would be 5 % faster."""
    gradient_wire: GradientWire = "model"
    """Type in which the gradient of a replica travels home: "model", that of the weights, or "float32"; sums are in
    float32."""
    sums: Literal["fast", "canonical"] = "fast"
    """"canonical": bitwise the same results under every plan of one schedule; slower, and turns `pack` off."""

    @property
    def live_slots(self) -> int:
        """Slots per rank where layers decide themselves."""
        return PEER_SLOTS if self.slots is None else self.slots

    @property
    def live(self) -> bool:
        """Whether layers decide on replicas while they run, so that no step is planned."""
        return self.balancer == "live"

    def dispatch_on(self, cluster: Cluster) -> Dispatch:
        """Return how tokens reach other nodes of this cluster: flat with canonical sums, where no relay can add."""
        return "flat" if self.sums == "canonical" else self.dispatch or cluster.dispatch


class ParallelSettings(Section):
    """Processes of the run; FSDP and expert parallelism span all of them."""

    ranks: int = Field(2, ge=1, le=1 << 15)
    """Number of processes; must divide the number of experts. Under `torchrun`: its number of processes."""
    launcher: Literal["local", "ray"] = "local"
    """"local": processes on this machine; "ray": on the nodes of a running Ray cluster, found as Ray finds it."""
    timeout_seconds: float = Field(1800.0, gt=0, le=1e7)
    """Seconds that a collective waits for a rank before the run ends with an error. For rollouts, rewards and writing,
    which may take longer on one rank than on others, ranks wait without end. A rank that ends is noticed soon."""
    heartbeat_seconds: float = Field(180.0, ge=1, le=1e7)
    """Seconds without a sign of life after which a rank counts as lost: its process is stopped, or its machine gone."""


class CheckpointSettings(Section):
    """Checkpoints, from which `relibra train --resume` continues."""

    every: int = Field(10, ge=0, le=LONGEST)
    """RL steps between checkpoints; 0: none."""
    keep: int = Field(2, ge=1, le=1 << 16)
    """Number of latest checkpoints to keep."""
    background: bool = True
    """Write while training goes on, from a copy in host memory; false: training waits until the files are written."""


class TraceSettings(Section):
    """Recorded routes of rollouts on disk, for reports and `relibra plan`; training needs none of them."""

    keep: int = Field(2, ge=0, le=1 << 30)
    """Latest steps whose routes are kept, and each 50th; a step takes about tokens x MoE layers x experts per token
    bytes. 0: none."""


class EvaluationSettings(Section):
    """Evaluation on held-out prompts."""

    every: int = Field(0, ge=0, le=LONGEST)
    """RL steps between evaluations; 0: none."""
    prompts: int = Field(64, ge=1, le=1 << 20)
    """Prompts per evaluation."""


class RunConfig(Section):
    """All settings of a run. `load_config` makes one: this class alone neither fills in defaults nor checks rules."""

    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    warmup: WarmupSettings = WarmupSettings()
    rollout: RolloutSettings = RolloutSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    update: UpdateSettings = UpdateSettings()
    critic: CriticSettings = CriticSettings()
    plan: PlanSettings = PlanSettings()
    parallel: ParallelSettings = ParallelSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    trace: TraceSettings = TraceSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and dict(self) == dict(other)

    @property
    def sources(self) -> dict[str, str]:
        """Where each value came from that is not the default, by section.key; {} on a rank, which gets values only."""
        return self._sources

    @property
    def follows_plans(self) -> bool:
        """Whether experts run in the executor (`relibra.parallel`): by plans, live, or static with canonical sums."""
        wanted = self.plan.balancer != "static" or self.plan.sums == "canonical"
        return wanted and (self.algorithm.replay != "off" or self.plan.live) and self.parallel.ranks > 1
