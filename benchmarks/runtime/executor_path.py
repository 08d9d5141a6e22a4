"""The executor's own path for every rank of a group, run one after another on one device.

For a few (micro-batch, layer) pairs the static layout and the plan of `relibra` are executed by the functions of the
executor, forward and backward: rows are prepared on the host, gathered, multiplied by the experts at home and in
slots, and added up. Exchanges between ranks are left out: rows arrive from a buffer. Copies into slots run on a stream
of their own beside the product; what they add to it is exposed.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from jaxtyping import Float64
from numpy import ndarray
from torch import Tensor, nn

from benchmarks.harness.provenance import quartiles
from benchmarks.runtime.emulated_ranks import busiest_over_mean, choose_pairs
from relibra.calibration.grouped_experts import ERROR_BOUNDS, seconds_each
from relibra.cluster import cluster_preset
from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP
from relibra.parallel.rows.dispatch import combine_tokens, dispatch_tokens
from relibra.parallel.rows.exchange import AllToAll
from relibra.parallel.rows.prepared_rows import PreparedRows, prepare_rows
from relibra.parallel.sorted_rows import SortedRows, slot_ends
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.planning.traffic.micro_batch_tables import micro_batch_tables
from relibra.planning.traffic.rank_tables import RankTables
from relibra.replay import BatchRoutes
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.trace import RoutingTrace

PARTS = ("gather", "product", "combine", "layer")
BALANCERS = ("static", "relibra")
SLOTS, SEED = 1, 0
ALLOWED = 0.15
"""What the busiest rank in seconds may differ from the busiest rank in token-slots, both over the mean rank."""

NO_GROUP = dist.ProcessGroup(0, 1)
"""Stands for the group of the ranks: nothing is exchanged in it."""

UNIT = (
    "milliseconds of the busiest rank, forward and backward, per micro-batch and layer (prepare: on the host, per "
    "layer); straggler and token skew: busiest / mean rank in seconds of the layer and in token-slots; off: straggler "
    "/ token skew - 1; exposed: copies into slots and product at once, less the product alone"
)
FIGURES = ("prepare ms", "gather ms", "product ms", "combine ms", "layer ms", "push ms", "exposed ms")


@dataclass(frozen=True, kw_only=True)
class PathModel:
    """A model whose experts are run.

    config        class of transformers' configuration, and what it calls the number of experts
    experts       module and class of its experts
    """

    name: str
    shape: ExpertShape
    num_experts: int
    config: tuple[str, str]
    experts: tuple[str, str]

    def experts_of(self, instances: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Return a module with this many experts, of random weights."""
        name, experts_key = self.config
        sizes = {"hidden_size": self.shape.hidden, "intermediate_size": self.shape.width, experts_key: instances}
        config = getattr(transformers, name)(**sizes, moe_intermediate_size=self.shape.width)
        config.num_experts = instances
        config._experts_implementation = "grouped_mm"
        module = importlib.import_module(f"transformers.models.{self.experts[0]}")
        experts: nn.Module = getattr(module, self.experts[1])(config).to(device, dtype)
        generator = torch.Generator(device).manual_seed(SEED)
        for parameter in experts.parameters():
            scale = 0.0 if parameter.ndim == 2 else self.shape.hidden**-0.5
            parameter.data.normal_(generator=generator).mul_(scale)
        return experts


MODELS = {
    "Qwen3-30B-A3B": (("Qwen3MoeConfig", "num_experts"), ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"), 128),
    "gpt-oss-20b": (("GptOssConfig", "num_local_experts"), ("gpt_oss.modeling_gpt_oss", "GptOssExperts"), 32),
    "DeepSeek-V2-Lite": (
        ("DeepseekV2Config", "n_routed_experts"),
        ("deepseek_v2.modeling_deepseek_v2", "DeepseekV2Experts"),
        64,
    ),
}


def path_model(name: str, shape: ExpertShape) -> PathModel:
    """Return one of MODELS with experts of a shape."""
    config, experts, num_experts = MODELS[name]
    return PathModel(name=name, shape=shape, num_experts=num_experts, config=config, experts=experts)


class Step(NamedTuple):
    """Routes of all micro-batches of a group, `[M, R]` samples of equal length."""

    trace: RoutingTrace
    demand: ScheduledDemand

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return int(self.demand.tokens_MLRE.shape[2])


def cut_step(trace: RoutingTrace, tokens: int, ranks: int, layers: int, micro_batches: int) -> Step | None:
    """Cut the recorded rows, in their order, into the last micro-batches of the trace; None: they fill none."""
    rows = np.flatnonzero(np.asarray(trace.valid_T))
    number = min(micro_batches, len(rows) // (tokens * ranks))
    if number == 0:
        return None
    position_L = np.linspace(0, trace.num_layers - 1, min(layers, trace.num_layers)).astype(int)
    experts_TLK = np.asarray(trace.experts_TLK)[rows[-number * tokens * ranks :]][:, position_L]
    samples = np.split(experts_TLK, number * ranks)
    cut = RoutingTrace.from_samples(samples, num_experts=trace.num_experts, layer_ids=list(range(len(position_L))))
    which = np.arange(number * ranks)
    return Step(cut, Demand.from_trace(cut).with_schedule(which // ranks, which % ranks, ranks))


class RankLayer(NamedTuple):
    """One layer of a micro-batch on one rank: what it does, and the seconds in which its rows were prepared."""

    tables: RankTables
    rows: PreparedRows
    layer: int
    prepare_seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arriving(AllToAll):
    """An exchange whose rows arrive from a buffer.

    buffer_XH   rows of any rank
    """

    buffer_XH: Tensor

    def move(self, rows: Tensor) -> Tensor:
        """Return as many rows as arrive; none is sent."""
        return self.buffer_XH[: sum(self.receive_R), : rows.shape[1]].to(rows.dtype)


def prepared_layers(plan: StepPlan, step: Step, micro_batch: int, layer: int, *, pinned: bool) -> list[RankLayer]:
    """Prepare a micro-batch on every rank, one after another, as its executor does; return one layer.

    The first round collects what the ranks tell each other, the second one, which is timed, has it.
    """
    sent: dict[int, tuple[Tensor, list[int]]] = {}

    def tell(sizes: AllToAll, message: Tensor) -> Tensor:
        rank = sizes.place.rank
        sent[rank] = message, sizes.send_R
        if len(sent) < plan.num_ranks or not complete:
            return message.new_zeros(sum(sizes.receive_R))
        return torch.cat([torch.split(text, sizes_R)[rank] for _, (text, sizes_R) in sorted(sent.items())])

    found: list[RankLayer] = []
    with mock.patch.object(AllToAll, "move", tell):
        for complete in (False, True):
            for rank in range(plan.num_ranks):
                routes = _routes_of(step, micro_batch, rank)
                start = time.thread_time()
                tables_L = micro_batch_tables(plan, step.demand, rank, micro_batch)
                rows = prepare_rows(tables_L, routes, NO_GROUP, send_once=True, pinned=pinned)
                seconds = (time.thread_time() - start) / len(tables_L)
                assert rows.problem is None, "the routes are those of the plan"
                if complete:
                    found.append(RankLayer(tables_L[layer], rows, layer, seconds))
    return found


def _routes_of(step: Step, micro_batch: int, rank: int) -> BatchRoutes:
    (sample,) = np.flatnonzero((step.demand.micro_batch_S == micro_batch) & (step.demand.rank_S == rank))
    return BatchRoutes.of_rows(
        [np.asarray(step.trace.experts_TLK)[step.trace.sample_rows(int(sample))]],
        num_experts=step.trace.num_experts,
        layer_ids=step.trace.layer_ids.tolist(),
        sample_ids=[0],
        weight_versions=[0],
    )


class Path:
    """The device's part of the path: experts of one rank, and rows that stand for those of any rank."""

    def __init__(self, model: PathModel, instances: int, rows: int, device: torch.device) -> None:
        """Allocate; emulated ranks share the memory, as values change no time.

        rows   most rows that any rank gathers, computes or has
        """
        self.device, self.dtype = device, torch.bfloat16
        self.layer = BalancedEP.__new__(BalancedEP)  # a rank alone has no mesh; what `run_rows` needs is set here
        self.layer.experts = model.experts_of(instances, device, self.dtype)
        self.layer.experts_forward = self.layer.experts.forward
        self.layer.num_local_experts = instances
        generator = torch.Generator(device).manual_seed(SEED)
        shape = (rows, model.shape.hidden)
        self.rows_XH = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
        self.gradient_XH = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

    def check(self) -> float:
        """Return the relative error of the experts' product against float64, expert by expert.

        raises   EngineError above the bound of the type
        """
        experts = self.layer.experts
        counts_P = torch.tensor([(33, 0, 1, 17)[slot % 4] for slot in range(len(next(experts.parameters())))])
        slot_Y = torch.repeat_interleave(torch.arange(len(counts_P)), counts_P).int()[: len(self.rows_XH)]
        ends_P = counts_P.cumsum(0).clamp(max=len(slot_Y)).int()
        rows = SortedRows(slot_Y.to(self.device), ends_P.to(self.device))
        rows_YH, ones_Y1 = self.rows_XH[: len(slot_Y)], self.rows_XH.new_ones(len(slot_Y), 1)
        with torch.no_grad():
            found = self.run_experts(rows_YH, rows, ones_Y1).double()
            config: Any = experts.config
            config._experts_implementation = "eager"
            kept = {name: parameter.data for name, parameter in experts.named_parameters()}
            try:
                experts.double()
                exact = self.run_experts(rows_YH.double(), rows, ones_Y1.double())
            finally:
                config._experts_implementation = "grouped_mm"
                for name, parameter in experts.named_parameters():
                    parameter.data = kept[name]
        error = float((found - exact).norm() / exact.norm())
        if not error <= ERROR_BOUNDS[self.dtype]:
            raise EngineError(
                f"experts of the executor on {self.device} in {self.dtype} are off by {error:.1e} relative to float64, "
                f"allowed is {ERROR_BOUNDS[self.dtype]:.0e}: nothing is timed, try another build of torch"
            )
        return error

    def run_experts(self, rows_YH: Tensor, rows: SortedRows, weight_Y1: Tensor) -> Tensor:
        """Return the weighted results of rows in slot order: experts at home and those in slots as one product."""
        return self.layer.run_rows(rows_YH, rows, weight_Y1)

    def works(self, one: RankLayer, top_k: int) -> dict[str, Callable[[], object]]:
        """Return the parts of one rank's layer; each runs forward and backward."""
        lists = one.rows.lists_on(self.device, None)[one.layer]
        tokens = len(lists.choice_X) // top_k
        exchange = _Arriving(
            send_R=one.tables.send_RP.sum(axis=1).tolist(),
            receive_R=one.tables.receive_RP.sum(axis=1).tolist(),
            group=NO_GROUP,
            place=one.tables.place,
            buffer_XH=self.rows_XH,
        )
        hidden_TH = self.rows_XH[:tokens].detach().requires_grad_()
        weights_TK = self.rows_XH[:tokens, :top_k].detach().float().requires_grad_()
        num, rows = len(lists.slot_Y), SortedRows(lists.slot_Y, slot_ends([one.tables], self.device)[0])
        rows_YH = self.rows_XH[:num].detach().requires_grad_()
        weight_Y1 = self.rows_XH[:num, :1].detach().float().requires_grad_()
        parameters = [*self.layer.experts.parameters()]

        def gather() -> None:
            gathered = dispatch_tokens(lists, exchange, hidden_TH, weights_TK)
            into = [self.gradient_XH[:num], self.gradient_XH[:num, :1].float()]
            torch.autograd.grad(gathered, [hidden_TH, weights_TK], into)

        def product() -> None:
            output_YH = self.run_experts(rows_YH, rows, weight_Y1)
            torch.autograd.grad(output_YH.sum(), [rows_YH, weight_Y1, *parameters], allow_unused=True)

        def combine() -> None:
            output_TH = combine_tokens(lists, exchange, rows_YH, tokens)
            torch.autograd.grad(output_TH, rows_YH, self.gradient_XH[:tokens])

        def layer() -> None:
            gathered_YH, gathered_Y1 = dispatch_tokens(lists, exchange, hidden_TH, weights_TK)
            output_YH = self.run_experts(gathered_YH, rows, gathered_Y1)
            output_TH = combine_tokens(lists, exchange, output_YH, tokens)
            inputs = [hidden_TH, weights_TK, *parameters]
            torch.autograd.grad(output_TH, inputs, self.gradient_XH[:tokens], allow_unused=True)

        return {"gather": gather, "product": product, "combine": combine, "layer": layer}

    def pushes(self, one: RankLayer) -> Callable[[], None]:
        """Return the copies of weights into the slots of a rank, twice: before the forward and the backward pass."""
        slots = [push.slot for _, push in one.tables.pushes_to_here]

        def copy() -> None:
            for _ in range(2):
                for slot in slots:
                    for weights in self.layer.experts.parameters():
                        weights.data[one.tables.num_homes + slot].copy_(weights.data[0], non_blocking=True)

        return copy


Span = Callable[[Callable[[], object] | None, Callable[[], object] | None, Callable[[], object]], float]
"""Returns the seconds of copies and work at once, either of which may be left out."""


def path_rows(
    model: PathModel, source: str, step: Step, pairs: int, repetitions: int, device: torch.device, span: Span
) -> Iterator[dict]:
    """Measure a model's layers with each balancer; the first repetition warms up and is thrown away."""
    ranks, top_k = step.num_ranks, step.trace.top_k
    chosen = choose_pairs(step.demand, pairs)
    layers = {name: _layers_of(name, model, step, chosen, device) for name in BALANCERS}
    instances = model.num_experts // ranks + SLOTS
    every = [one for of_pairs in layers.values() for of_ranks in of_pairs for one in of_ranks]
    most = max(max(int(one.tables.receive_RP.sum()), int(one.tables.tokens_E.sum())) for one in every)
    path = Path(model, instances, max(most, 64), device)
    error = path.check()
    whole: dict[str, float] = {}
    for name in BALANCERS:
        times = _times(path, layers[name], top_k, repetitions, device, span)
        load_PR = np.array([[int(one.tables.receive_RP.sum()) for one in ranks_] for ranks_ in layers[name]])
        medians = {part: np.median(found_NPR, axis=0) for part, found_NPR in times.items()}
        skew, straggler = busiest_over_mean(load_PR), busiest_over_mean(medians["layer"])
        busiest_NP = times["layer"][:, np.arange(len(load_PR)), medians["layer"].argmax(axis=1)]
        whole[name] = float(medians["layer"].max(axis=1).sum())
        off = straggler / skew - 1
        yield {
            "case": f"{model.name}, EP {ranks}, {name}", "label": "measured", "unit": UNIT, "source": source,
            "ep": ranks, "balancer": name, "pairs": len(load_PR), "token_skew": skew, "straggler": straggler,
            "off": off, "target": ALLOWED, "ok": bool(abs(off) <= ALLOWED),
            **{f"{part} ms": 1000 * float(of_part.max(axis=1).mean()) for part, of_part in medians.items()},
            **quartiles(1000 * busiest_NP.mean(axis=1), "layer ms"),
            "layer / static": whole[name] / whole["static"],
            "ms of ranks": {part: (1000 * of_part.mean(axis=0)).tolist() for part, of_part in medians.items()},
            "error": error, "seed": SEED, "repetitions": repetitions,
        }  # fmt: skip


def _layers_of(
    balancer: str, model: PathModel, step: Step, pairs: Sequence[tuple[int, int]], device: torch.device
) -> list[list[RankLayer]]:
    ranks = step.num_ranks
    budget = Budget(slots=SLOTS, place_samples=False, objective="tokens", threads=1)
    plan = plan_step(step.demand, cluster_preset("h100x8", ranks, min(8, ranks)), budget, balancer, expert=model.shape)
    pinned = device.type == "cuda"
    return [prepared_layers(plan, step, m, layer, pinned=pinned) for m, layer in pairs]


def _times(
    path: Path,
    layers: list[list[RankLayer]],
    top_k: int,
    repetitions: int,
    device: torch.device,
    span: Span,
) -> dict[str, Float64[ndarray, "N P R"]]:
    """Time all parts of all ranks, part by part, rank after rank."""
    works = [[path.works(one, top_k) for one in of_ranks] for of_ranks in layers]
    copies = [[path.pushes(one) for one in of_ranks] for of_ranks in layers]
    found: dict[str, list[list[list[float]]]] = {part: [] for part in ("prepare", *PARTS, "push", "exposed")}
    for repetition in range(repetitions + 1):
        turn = {part: [seconds_each([one[part] for one in ranks], device) for ranks in works] for part in PARTS}
        turn["prepare"] = [[one.prepare_seconds for one in of_ranks] for of_ranks in layers]
        turn["push"], turn["exposed"] = [], []
        for copies_R, works_R in zip(copies, works, strict=True):
            alone = [span(copy, None, work["product"]) for copy, work in zip(copies_R, works_R, strict=True)]
            computing = [span(None, work["product"], work["product"]) for work in works_R]
            together = [
                span(copy, work["product"], work["product"]) for copy, work in zip(copies_R, works_R, strict=True)
            ]
            turn["push"].append(alone)
            turn["exposed"].append([max(0.0, both - one) for both, one in zip(together, computing, strict=True)])
        for part, of_part in turn.items():
            if repetition:
                found[part].append(of_part)
    return {part: np.array(of_part) for part, of_part in found.items()}
