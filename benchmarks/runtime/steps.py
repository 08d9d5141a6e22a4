"""Steps for `runtime.py`: routes of a wanted rank skew, the model, and one rank's forward and backward passes."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from benchmarks.harness.process_memory import process_bytes
from relibra.parallel import PlanExecution, balance_live, execute_plan, register, relocate
from relibra.parallel.balanced import parameters_replaced
from relibra.parallel.rows import live_rows
from relibra.planning.plan import StepPlan
from relibra.replay import BatchRoutes, replay_routing
from relibra.routing.demand import ScheduledDemand
from relibra.routing.trace import RoutingTrace

NUM_RANKS = 2
VOCAB = 512
_JOINS = {
    "seconds": max,
    "processor": sum,
    "exposed": max,
    "unprepared": max,
    "preparing": max,
    "moved": max,
    "peak": max,
    "pushed": sum,
    "returned": sum,
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model and its batches; samples of `length` tokens, `samples` per rank and micro-batch."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    samples: int
    length: int
    micro_batches: int
    ranks: int = NUM_RANKS
    per_node: int = NUM_RANKS
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        """Tokens of a rank in a micro-batch."""
        return self.samples * self.length

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.ranks * self.micro_batches

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.width * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of weights and rows."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def config(self) -> Qwen3MoeConfig:
        """Describe the model to transformers."""
        return Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.width,
            moe_intermediate_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=self.hidden // 8,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            max_position_embeddings=max(512, self.length),
            tie_word_embeddings=False,
        )


def skewed_routes(sizes: Sizes, skew: float, seed: int) -> RoutingTrace:
    """Draw routes where one of R ranks gets skew / R of the token-slots of each (micro-batch, layer).

    Which rank, and which of its experts are popular, is drawn again for each; the others share the rest. A rank has as
    many experts as a token has choices, or more: all of them may fall on it.
    """
    rng, R = np.random.default_rng(seed), sizes.ranks
    own, shape = sizes.experts // R, (sizes.rows * R, sizes.layers, sizes.top_k)
    assert own >= sizes.top_k, f"{own} experts of a rank for {sizes.top_k} choices of a token"
    samples: list[np.ndarray] = []
    for _ in range(sizes.micro_batches):
        experts_TLK = np.empty(shape, dtype=np.uint8)
        for layer in range(sizes.layers):
            hot, weight_RE = rng.integers(R), rng.dirichlet(np.full(own, 2.0), size=R)
            on_hot_TK = rng.random((len(experts_TLK), sizes.top_k)) < skew / R
            other_TK = hot + 1 + (rng.integers(R - 1, size=on_hot_TK.shape) if R > 2 else 0)
            rank_TK = np.where(on_hot_TK, hot, other_TK % R)
            # Gumbel top-k per rank: distinct experts, popular ones first.
            keys_RTE = np.log(weight_RE)[:, None] + rng.gumbel(size=(R, len(experts_TLK), own))
            order_RTE = np.argsort(-keys_RTE, axis=2)
            for rank in range(R):
                nth_TK = np.cumsum(rank_TK == rank, axis=1) - 1
                chosen_TK = np.take_along_axis(order_RTE[rank], np.maximum(nth_TK, 0), axis=1) + rank * own
                experts_TLK[:, layer] = np.where(rank_TK == rank, chosen_TK, experts_TLK[:, layer])
        samples += np.split(experts_TLK, sizes.samples * R)
    return _trace(samples, sizes)


def balanced_routes(sizes: Sizes) -> RoutingTrace:
    """Give every expert the same number of token-slots: each E / K tokens share out a permutation of the experts."""
    rng = np.random.default_rng(0)
    blocks = -(-sizes.tokens * sizes.top_k // sizes.experts) * sizes.layers
    drawn = rng.permuted(np.tile(np.arange(sizes.experts, dtype=np.uint8), (blocks, 1)), axis=1)
    experts_LTK = drawn.reshape(sizes.layers, -1, sizes.top_k)[:, : sizes.tokens]
    return _trace(np.split(experts_LTK.swapaxes(0, 1), sizes.samples * sizes.ranks * sizes.micro_batches), sizes)


def _trace(samples: list[np.ndarray], sizes: Sizes) -> RoutingTrace:
    return RoutingTrace.from_samples(samples, num_experts=sizes.experts, layer_ids=list(range(sizes.layers)))


def schedule(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return (micro-batch, rank) of each sample, in their order."""
    number = np.arange(sizes.samples * sizes.ranks * sizes.micro_batches)
    return number // (sizes.samples * sizes.ranks), number // sizes.samples % sizes.ranks


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is measured: routes, who executes them, and under which plan (None: `all_to_all`).

    skew, planned_skew   of the routes on the static layout, and under the plan
    ahead                routes of all micro-batches are known when the step begins, as in `relibra train`
    live_apart           rows without routes have an exchange of their own, however few they are
    live_tolerance       accepted load above the lowest reachable, where layers balance live instead of following the
                         plan, which then says what they reach; None: they follow the plan
    """

    name: str
    trace: RoutingTrace
    demand: ScheduledDemand
    plan: StepPlan | None
    skew: float
    planned_skew: float
    sums: str = "fast"
    ahead: bool = True
    live_apart: bool = False
    live_tolerance: float | None = None

    @property
    def resident_slots(self) -> int:
        """Spare slots per rank and layer."""
        return self.plan.slots if self.plan is not None and self.plan.resident else 0

    @property
    def shared_slots(self) -> int:
        """Spare slots per rank, for all layers."""
        return 0 if self.plan is None else self.plan.slots - self.resident_slots

    @property
    def copies(self) -> int:
        """Replicas that compute something, over all micro-batches and layers."""
        return 0 if self.plan is None else int((self.plan.quota_MLRB > 0).sum())


@dataclass(kw_only=True)
class Found:
    """What the ranks found, by name of the variant, one entry per repetition; the worse rank counts.

    processor        processor seconds of all ranks
    exposed          seconds of waiting for pushes and returns, and of live decisions
    unprepared       seconds of waiting for the rows of a micro-batch
    preparing        seconds in which rows of micro-batches were prepared, beside other work or not
    pushed, returned   bytes of weights and of gradients of replicas that the ranks send, together
    expert_seconds   of one rank for the experts of a step of balanced routes, and nothing else
    """

    seconds: dict[str, list[float]]
    processor: dict[str, list[float]]
    exposed: dict[str, list[float]]
    unprepared: dict[str, list[float]]
    preparing: dict[str, list[float]]
    moved: dict[str, list[float]]
    peak: dict[str, list[int]]
    pushed: dict[str, list[int]]
    returned: dict[str, list[int]]
    expert_seconds: float


def on_ranks(sizes: Sizes, variants: list[Variant], folder: Path, repetitions: int) -> Found:
    """Run all variants in processes of their own, taking turns; without repetitions, once each, looking at memory."""
    save_model(sizes, folder)
    (folder / "rendezvous").unlink(missing_ok=True)
    with freed_memory(kept=repetitions > 0):
        spawn(_work, (sizes, variants, folder, repetitions), nprocs=sizes.ranks)
    return joined([json.loads((folder / f"{rank}.json").read_text()) for rank in range(sizes.ranks)])


def save_model(sizes: Sizes, folder: Path) -> None:
    """Write a random model of these sizes, the same each time."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(sizes.config(), dtype=sizes.torch_dtype).save_pretrained(folder)


def joined(found: list[dict]) -> Found:
    """Return what all ranks found; of each repetition the worse rank counts, or the sum."""
    by_key = {
        key: {
            name: [join(of_ranks) for of_ranks in zip(*(one[key][name] for one in found), strict=True)]
            for name in found[0][key]
        }
        for key, join in _JOINS.items()
    }
    return Found(**by_key, expert_seconds=max(one["expert_seconds"] for one in found))


def freed_memory(*, kept: bool) -> AbstractContextManager[None]:
    """Let processes that are started inside keep what they free, as a caching allocator does, or give it back at once.

    Kept where time is measured: else the kernel clears the pages of each large array when they are first written.
    """
    size = str(1 << (40 if kept else 16))
    return _environment({"MALLOC_MMAP_THRESHOLD_": size, "MALLOC_TRIM_THRESHOLD_": size})


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _work(rank: int, sizes: Sizes, variants: list[Variant], folder: Path, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=sizes.ranks)
    (folder / f"{rank}.json").write_text(json.dumps(measure(sizes, variants, folder, repetitions)))
    dist.barrier()
    dist.destroy_process_group()


def measure(sizes: Sizes, variants: list[Variant], folder: Path, repetitions: int) -> dict:
    """Return what this rank finds, as `Found` has it; collective.

    folder   has the model
    """
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    register()
    models = {name: load(sizes, folder, name) for name in ("all_to_all", "relibra")}
    steps = [Step(variant, sizes, models["all_to_all" if variant.plan is None else "relibra"]) for variant in variants]
    found = {key: {step.variant.name: [] for step in steps} for key in _JOINS}
    first_of_each_model = {step.variant.plan is None: step for step in reversed(steps)}.values()
    for step in steps if repetitions else first_of_each_model:  # warm-up
        step.run()
    for repetition in range(max(1, repetitions)):
        for turn in range(len(steps)):
            step = steps[(turn + repetition) % len(steps)]
            for key, value in step.run().items():
                found[key][step.variant.name].append(value)
    return {**found, "expert_seconds": _expert_seconds(sizes, models["all_to_all"], max(1, repetitions))}


def load(sizes: Sizes, folder: Path, implementation: str) -> nn.Module:
    """Load the model with its experts spread over the ranks."""
    config = DistributedConfig(fsdp_size=sizes.ranks, ep_size=sizes.ranks, ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=sizes.torch_dtype).train()


class Step:
    """Forward and backward passes of one variant on one rank."""

    def __init__(self, variant: Variant, sizes: Sizes, model: nn.Module) -> None:
        self.variant, self.model, self.device = variant, model, next(model.parameters()).device
        micro_batch_S, rank_S = schedule(sizes)
        self.batches: list[tuple[BatchRoutes, Tensor]] = []
        generator = torch.Generator().manual_seed(dist.get_rank())
        for m in range(sizes.micro_batches):
            own = np.flatnonzero((micro_batch_S == m) & (rank_S == dist.get_rank())).tolist()
            tokens_BN = torch.randint(VOCAB, (sizes.samples, sizes.length), generator=generator)
            routes = BatchRoutes.padded(variant.trace.select(own), torch.ones_like(tokens_BN))
            self.batches.append((routes, tokens_BN.to(self.device)))

    def run(self) -> dict[str, float]:
        """Return seconds until all ranks are done, and of this rank what `Found` has."""
        plan, moved, sent = self.variant.plan, 0.0, {"push": 0, "return": 0}
        waited = dict.fromkeys(
            ("wait push", "wait return", "wait prepare", "prepare", "wait counts", "wait solve"), 0.0
        )
        if plan is not None:
            moved = relocate(self.model, plan.physical_to_logical_map).seconds
        self.model.zero_grad()
        known = {m: replace(routes) for m, (routes, _) in enumerate(self.batches)}  # new objects: prepared anew
        before = _begin_peak(self.device)
        _meet(self.device)
        start, worked = time.perf_counter(), time.process_time()
        with self._way_of_live_rows(), self._execution(known if self.variant.ahead else None) as step:
            for m, (_, tokens_BN) in enumerate(self.batches):
                routes = known[m]
                # As in `relibra train`: gradients are reduced once, after the last micro-batch.
                self.model.set_requires_gradient_sync(m == len(self.batches) - 1)
                with (
                    step.micro_batch(m, routes)
                    if isinstance(step, PlanExecution)
                    else replay_routing(self.model, routes)
                ):
                    logits = self.model(tokens_BN, use_cache=False).logits
                    cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BN[:, 1:].flatten()).backward()
            worked = time.process_time() - worked
            _meet(self.device)
            seconds = time.perf_counter() - start
            if step is not None:
                timeline = step.timeline()
                waited = {stage: float(timeline.seconds(stage)[dist.get_rank()]) for stage in waited}
                sent = {kind: sum(event.bytes for event in timeline.events if event.stage == kind) for kind in sent}
        found = {"seconds": seconds, "processor": worked, "moved": moved, "peak": _peak(self.device) - before}
        exposed = sum(waited[stage] for stage in ("wait push", "wait return", "wait counts", "wait solve"))
        found |= {"exposed": exposed, "unprepared": waited["wait prepare"]}
        return {**found, "preparing": waited["prepare"], "pushed": sent["push"], "returned": sent["return"]}

    def _way_of_live_rows(self):
        return mock.patch.object(live_rows, "MOST_SHARE", 0.0) if self.variant.live_apart else nullcontext()

    def _execution(self, routes):
        plan, demand, sums = self.variant.plan, self.variant.demand, self.variant.sums
        if plan is not None and self.variant.live_tolerance is not None:
            return balance_live(self.model, slots=plan.slots, tolerance=self.variant.live_tolerance, sums=sums)
        return nullcontext() if plan is None else execute_plan(self.model, plan, demand, sums=sums, routes=routes)


def _meet(device: torch.device) -> None:
    """Wait for this rank's device and for all ranks; nothing between two meetings waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def _begin_peak(device: torch.device) -> int:
    """Return the bytes of this rank before a step: of its device, or of its process where a CPU computes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return process_bytes("VmRSS", reset_peak=True)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_bytes("VmHWM")


def _expert_seconds(sizes: Sizes, model: nn.Module, repetitions: int) -> float:
    """Time what one rank's experts compute in a step of balanced routes, forward and backward."""
    experts = next(module for name, module in model.named_modules() if name.endswith(".experts"))
    local = {name: p.to_local().detach().requires_grad_() for name, p in experts.named_parameters(recurse=False)}
    device = next(iter(local.values())).device
    rows = torch.randn(sizes.rows * sizes.top_k, sizes.hidden, dtype=sizes.torch_dtype, device=device).requires_grad_()
    slot_Y1 = (torch.arange(len(rows), device=device) * (sizes.experts // sizes.ranks) // len(rows)).unsqueeze(1)
    weight_Y1 = rows.new_ones(len(rows), 1)
    seconds = []
    for _ in range(1 + repetitions):
        _meet(device)
        start = time.perf_counter()
        with parameters_replaced(experts, local):
            type(experts).forward(experts, rows, slot_Y1, weight_Y1).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])) * sizes.layers * sizes.micro_batches
