"""Training steps of Qwen3-30B-A3B and gpt-oss-20b, by all of `relibra train` but sampling: tokens/s, GiB, seconds.

On the GPUs of a machine, one process for each: make bench-gpus GPUS=8 (BENCH="..." passes options and settings), or
torchrun --nproc-per-node 8 -m benchmarks training [--model NAME] [--layers N] [--length TOKENS] [section.key=value ...]
On one GPU: relibra bench training --layers 3. On a CPU: relibra bench training --quick, toy sizes; writes no rows.
Weights, responses and routes are made up: a folder of random weights is written, loaded and trained, in steps of
`rl_step`, whose routes are planned for and replayed. Only the first step warms up. --layers keeps the first layers
alone. --group responses share a prompt of --prompt tokens, computed once unless update.shared_prompts=false. As in
`relibra train`, the memory of the run is estimated first, and slots of plans take at most what that leaves; the table
has the estimate beside the measured peak, and the published figures of other trainers below. It says what it ran on,
so that it can be sent to us as it is. Rows go to results/training.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import transformers

from benchmarks.harness.options import measurement_options
from benchmarks.harness.process_memory import process_bytes
from benchmarks.harness.provenance import commit, write_results
from relibra.calibration.machine import find_cluster
from relibra.environment import launched_rank
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.memory.estimate import ESTIMATE_FILE, GIB, Estimate
from relibra.rl.memory.estimator import estimate_memory, with_estimate
from relibra.rl.model.optimizer import make_optimizer
from relibra.rl.model.policy import build_policy
from relibra.rl.model.sharding import quiet_loading, save_activations
from relibra.rl.rollout.response import Response, RolloutCost, Window
from relibra.rl.run.rank import choose_device
from relibra.rl.run.ranks import broadcast_json, connect_ranks, gather_json, joined_ranks, wait_for_ranks
from relibra.rl.run.step_trace import StepTraces
from relibra.rl.step import Learner, Progress, rl_step
from relibra.rl.tasks.task import Prompt
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.update.planned_activations import PlannedActivations

SEED = 0
SPREAD = 0.8
"""Standard deviation of the popularity of experts, as a logarithm."""
PROMPT = 32
ON_HOST = ("update.offload=moments", "update.activations=host")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "config": "Qwen3MoeConfig", "cases": ((4096, ()), (16384, ON_HOST)),
        "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "config": "GptOssConfig", "cases": ((8192, ()), (16384, ON_HOST)),
        "num_hidden_layers": 24, "num_local_experts": 32,
    },
}  # fmt: skip
"""Sizes, and what is measured unless the command line says it: tokens of a response, and settings."""
TOY = {
    "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "num_hidden_layers": 2, "sliding_window": 16,
}  # fmt: skip
UNIT = (
    "seconds of a step without sampling: planning, moving experts, recompute, update; tokens per second and GPU of "
    "such a step, and of its update alone, as in fine-tuning; most memory of a GPU: tensors, and held by torch"
)
CITED = (
    ("prime-rl, RL, 16k, optimizer on the host", {"update_tokens_per_second": 764.0, "gib": 74.6}),
    ("prime-rl, RL, LoRA r=16, 16k", {"update_tokens_per_second": 4137.0, "gib": 31.6}),
    ("NeMo AutoModel, fine-tuning, 4k", {"update_tokens_per_second": 11340.0, "gib": 48.1}),
)
"""Of Qwen3-30B-A3B on 8 H100. prime-rl: its benchmarks/results/BENCHMARKS.md of 2026-02-07, 131,072 tokens in 21.44 s
and in 3.96 s; NeMo AutoModel: huggingface.co/blog/nvidia/accelerating-fine-tuning-nvidia-nemo-automodel, 2026-06-24."""
UNTIMED = ("rollout", "reward", "trace", "sync", "checkpoint")
"""Stages of a step that are made up here, or write files."""


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    length          tokens of a response with its prompt
    prompt          tokens of a prompt
    group           responses of a prompt
    tokens          of a rank's micro-batch
    micro_batches   of a step, which is one optimizer step
    settings        of relibra train, as section.key=value
    """

    model: str
    layers: int
    length: int
    tokens: int
    prompt: int = PROMPT
    group: int = 2
    micro_batches: int = 2
    settings: tuple[str, ...] = ()
    toy: bool = False

    @property
    def shared(self) -> list[str]:
        """Return words on long prompts."""
        return [f"{self.group} responses to each prompt of {self.prompt:,}"] if self.prompt != PROMPT else []

    def config(self) -> Any:
        """Describe the model to transformers."""
        known = {name: value for name, value in MODELS[self.model].items() if name not in ("config", "cases")}
        known |= {name: value for name, value in TOY.items() if self.toy and (name in known or name in _COMMON)}
        config_class = getattr(transformers, MODELS[self.model]["config"])
        return config_class(**{**known, "num_hidden_layers": self.layers})


_COMMON = ("hidden_size", "intermediate_size", "num_experts_per_tok", "num_attention_heads", "num_key_value_heads",
           "head_dim", "vocab_size", "sliding_window")  # fmt: skip


@dataclass(frozen=True)
class MadeUpTask:
    """Prompts of `length` tokens, and rewards that differ."""

    length: int
    characters: ClassVar[str] = "abcdefgh."

    def prompt(self, number: int) -> Prompt:
        """Return a letter many times."""
        return Prompt(text=self.characters[number % 8] * self.length)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Return the same prompts."""
        return [self.prompt(number) for number in range(count)]

    def answer(self, _prompt: Prompt, /) -> None:
        """Return None: there is no right one."""

    def reward(self, _prompt: Prompt, response: str, /, *, stopped: bool) -> float:
        """Return 1.0 for responses with the first token."""
        return float(self.characters[0] in response and not stopped)


class MadeUpEngine:
    """Samples random tokens in no time; experts of a layer are more and less popular."""

    def __init__(self, rows: int, layers: int, num_experts: int, top_k: int) -> None:
        rng, routes = np.random.default_rng(SEED), np.empty((rows, layers, top_k), dtype=np.uint8)
        for layer in range(layers):
            key_TE = SPREAD * rng.normal(size=num_experts) + rng.gumbel(size=(rows, num_experts))
            routes[:, layer] = np.argpartition(-key_TE, top_k, axis=1)[:, :top_k]
        self._routes_TLK = routes

    def generate(
        self, responses: Sequence[Response], *, window: int, **_limits: object
    ) -> tuple[list[Window], RolloutCost]:
        """Add a window to each response."""
        cost = RolloutCost(
            decode_steps=window, passes=None, slot_steps=window, busy_slot_steps=window, prefilled_tokens=0
        )
        return [self._window(response, window) for response in responses], cost

    def _window(self, response: Response, window: int) -> Window:
        rng = np.random.default_rng([SEED, response.sample_id])
        tokens_w = rng.integers(3, len(MadeUpTask.characters), window)  # never the stop token
        tokens_w[0] = 1 + response.sample_id % 2  # what is rated: every prompt has both, so every response is trained
        return Window(
            tokens_w=tokens_w,
            log_probs_w=np.full(window, -2.0, dtype=np.float32),
            experts_mLK=np.roll(self._routes_TLK, int(rng.integers(1 << 20)), axis=0),
            stopped=False,
        )


def run_settings(sizes: Sizes, folder: Path, num_ranks: int) -> RunConfig:
    """Return the settings of a run in which a server samples, so that no copy of the model is for that."""
    responses = num_ranks * sizes.micro_batches * (sizes.tokens // sizes.length)
    own = {
        "model.path": folder, "parallel.ranks": num_ranks, "rollout.max_prompt": sizes.prompt,
        "rollout.max_response": sizes.length - sizes.prompt, "rollout.prompts_per_step": responses // sizes.group,
        "rollout.responses_per_prompt": sizes.group, "update.mini_batches": 1,
        "update.micro_batch_tokens": sizes.tokens, "update.max_mismatch": 1e9, "trace.keep": 0,
        "rollout.engine": "vllm", "rollout.url": "http://127.0.0.1:1", "rollout.server_weights": folder / "unused",
    }  # fmt: skip
    return load_config(None, [*(f"{name}={value}" for name, value in own.items()), *sizes.settings])


def measure(sizes: Sizes, steps: int, device: torch.device, per_node: int) -> dict[str, Any]:
    """Return the row of a case; collective, on the ranks of one machine."""
    own = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("")
    with own as name:
        folder = Path(broadcast_json(name))
        config = run_settings(sizes, folder, dist.get_world_size())
        if dist.get_rank() == 0:
            config = write_run(config, sizes, folder, device)
        config = RunConfig.model_validate(broadcast_json(config.model_dump(mode="json")))
        found = _run(config, sizes, steps, device, per_node, folder)
        wait_for_ranks()
    seconds, peaks_R = found["seconds"], gather_json(found["peaks"])
    timed = [sum(value for stage, value in one.items() if stage not in UNTIMED) for one in seconds]
    tokens = sizes.micro_batches * (sizes.tokens // sizes.length) * (sizes.length - 1)  # of a rank
    gib, reserved_gib = (max(peaks[i] for peaks in peaks_R) / GIB for i in (0, 1))
    return {
        "case": ", ".join([sizes.model, f"{sizes.length:,} tokens", *sizes.shared, *sizes.settings]),
        "label": "measured", "seed": SEED, "repetitions": steps, "unit": UNIT, "ranks": dist.get_world_size(),
        "layers": sizes.layers, "seconds": statistics.median(timed), "recompute_seconds": _median(seconds, "recompute"),
        "update_seconds": _median(seconds, "update"), "sync_seconds": _median(seconds, "sync"),
        "tokens_per_second": tokens / statistics.median(timed),
        "update_tokens_per_second": tokens / _median(seconds, "update"), "gib": gib, "reserved_gib": reserved_gib,
        "estimated_gib": found["estimated"] / GIB, "estimated_phase": found["phase"],
        "estimated_parts": found["parts"], "slot_gib": config.plan.memory_gib, "activations": found["activations"],
        "skew": found["skew"], "configuration": f"{dist.get_world_size()} x {device_name(device)}, {sizes.layers} "
        f"layers, {sizes.micro_batches} micro-batches of {sizes.tokens:,} tokens per GPU",
    }  # fmt: skip


def write_run(config: RunConfig, sizes: Sizes, folder: Path, device: torch.device) -> RunConfig:
    """Write a model with random weights and the estimate of its run; return the run, its slots within the estimate."""
    with ThreadPoolExecutor(1) as pool:
        described = sizes.config()
        described.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(described)].__name__]
        described.save_pretrained(folder)  # all that an estimate reads
        estimated = pool.submit(estimate_memory, config)
        write_random_weights(sizes, folder, device)
        found, _ = estimated.result()
    (folder / ESTIMATE_FILE).write_text(json.dumps(found.as_json()))
    return with_estimate(config, found)


def write_random_weights(sizes: Sizes, folder: Path, device: torch.device) -> None:
    """Write a folder of a model with random weights, made on the device, where it has to fit in bfloat16."""
    torch.manual_seed(SEED)
    with torch.device(device), quiet_loading():
        model = transformers.AutoModelForCausalLM.from_config(sizes.config(), dtype=torch.bfloat16)
    with quiet_loading():
        model.save_pretrained(folder)


def _run(
    config: RunConfig, sizes: Sizes, steps: int, device: torch.device, per_node: int, folder: Path
) -> dict[str, Any]:
    """Return the seconds of each step by stage, and this rank's most bytes."""
    tokenizer = CharacterTokenizer(MadeUpTask.characters)
    _free(device)
    policy = build_policy(
        config, tokenizer.vocab_size, folder, device, longest=sizes.length, decodes=False, samples=False
    )
    save_activations(policy.trained, config.update.activations)
    cluster = find_cluster(config.plan.cluster, device, config.parallel.ranks, per_node)
    cluster = replace(cluster, dispatch=config.plan.dispatch_on(cluster))
    activations = None
    if config.update.activations == "plan":
        activations = PlannedActivations.of_run(folder, policy.trained, cluster, policy.shape, config.plan.memory_gib)
    learner = Learner(
        config=config,
        policy=policy,
        optimizer=make_optimizer(policy.trained, config.update.learning_rate, config.update),
        critic=None,
        loss=find_loss(config),
        engine=MadeUpEngine(sizes.length - 1, len(policy.layer_ids), policy.num_experts, policy.top_k),
        task=MadeUpTask(sizes.prompt),
        tokenizer=tokenizer,
        cluster=cluster,
        activations=activations,
    )
    traces = StepTraces(folder, config.trace, num_experts=policy.num_experts, layer_ids=policy.layer_ids)
    progress, seconds, metrics = Progress(), list[dict[str, float]](), dict[str, Any]()
    for step in range(steps + 1):
        if step == 1:  # the optimizer has its moments
            seconds.clear()
            _reset_peak(device)
        result = rl_step(step, learner, progress, traces)
        progress, metrics = result.progress, result.metrics
        assert not metrics["equal_groups"], "a response that is not trained would count as if it was"
        seconds.append(metrics["seconds"])
    peak = Estimate.from_json(json.loads((folder / ESTIMATE_FILE).read_text())).peak
    return {
        "seconds": seconds, "peaks": _peaks(device), "skew": metrics.get("planned_skew"), "estimated": peak.total,
        "phase": peak.phase, "parts": {part: nbytes / GIB for part, nbytes in peak.parts.items() if nbytes},
        "activations": activations.take_line() if activations else config.update.activations,
    }  # fmt: skip


def _median(seconds: list[dict[str, float]], stage: str) -> float:
    return statistics.median(one.get(stage, 0.0) for one in seconds)  # with one optimizer step nothing is recomputed


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        process_bytes("VmHWM", reset_peak=True)


def _peaks(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return process_bytes("VmHWM"), process_bytes("VmHWM")


def device_name(device: torch.device) -> str:
    """Return what the maker calls it; "CPU" for any CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of rows, and of the published figures below them.

    >>> print(table([]).splitlines()[-1])
    | cited: NeMo AutoModel, fine-tuning, 4k | NVIDIA H100 | 48 | 8 |  |  | 11,340 | 48.1 |  |  |
    """
    titles = ("case", "on", "layers", "GPUs", "s / step", "tokens/s, GPU", "update alone", "GiB", "estimated", "held")
    where = {"configuration": "8 x NVIDIA H100", "layers": 48, "ranks": 8}
    cited = [{"case": f"cited: {case}", **where, **figures} for case, figures in CITED]
    lines = [titles, tuple("---" for _ in titles)]
    for row in (*rows, *cited):
        on = str(row.get("configuration", "")).partition(",")[0].partition(" x ")[2]
        figures = (
            ("seconds", ".2f"), ("tokens_per_second", ",.0f"), ("update_tokens_per_second", ",.0f"), ("gib", ".1f"),
            ("estimated_gib", ".1f"), ("reserved_gib", ".1f"),
        )  # fmt: skip
        shown = (format(row[name], form) if name in row else "" for name, form in figures)
        lines.append((row["case"], on, str(row["layers"]), str(row["ranks"]), *shown))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure all cases on the ranks that torchrun started, or on this one."""
    parser = measurement_options(__doc__)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings, as of relibra train")
    parser.add_argument("--model", choices=[*MODELS], help="default: both")
    parser.add_argument("--layers", type=int, help="the first layers alone; default: all")
    parser.add_argument("--length", type=int, nargs="*", help="tokens of a response with its prompt")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens of a prompt; default: {PROMPT}")
    parser.add_argument("--group", type=int, default=2, help="responses of a prompt; default: 2")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch of a GPU; default: 16384")
    parser.add_argument("--steps", type=int, default=3, help="that are timed; default: 3")
    options = parser.parse_intermixed_args()
    launched, on_gpu = launched_rank(), torch.cuda.is_available()
    if not on_gpu and not options.quick:
        print("skipped: torch sees no CUDA device here; --quick tries the program on a CPU with toy sizes")
        return
    local_rank, per_node = (launched.local_rank, launched.num_local_ranks) if launched else (0, 1)
    device = choose_device(local_rank, per_node)
    torch.set_num_threads(1)
    alone = None if launched else connect_ranks(1800, "tcp://127.0.0.1:0?rank=0&world_size=1")
    with joined_ranks(1800, device, alone):
        rows = [measure(one, 1 if options.quick else options.steps, device, per_node) for one in cases(options)]
        first = dist.get_rank() == 0
    if not first:
        return
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(table(rows))
        print(
            f"\n{device_name(device)}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
            f"{platform.python_version()}, commit {commit()[:12]}; random weights and routes. {UNIT}"
        )
    if not options.quick:
        words = f"relibra bench training {shlex.join(sys.argv[1:])}".strip()  # on several GPUs under torchrun
        print(write_results("training", rows, words, options.output), file=sys.stderr)


def cases(options: argparse.Namespace) -> list[Sizes]:
    """Return what the command line asks for; settings alone change all that would be measured without."""
    found = []
    for model in [options.model] if options.model else MODELS:
        toy, sizes = options.quick, MODELS[model]
        layers = TOY["num_hidden_layers"] if toy else options.layers or sizes["num_hidden_layers"]
        wanted = [(length, ()) for length in options.length] if options.length else sizes["cases"]
        for length, settings in wanted:
            length = 128 if toy else length
            tokens = 2 * length if toy else max(options.tokens, length)
            settings = (*settings, *options.settings)
            group, prompt = options.group, options.prompt
            found.append(Sizes(model, layers, length, tokens, prompt=prompt, group=group, settings=settings, toy=toy))
    return found


if __name__ == "__main__":
    main()
