"""Cells of `relibra bench step`: which step runs on which ranks, and its demand.

A recording, or a generated pool of samples, is too short for a step: its samples are drawn again, seeded, as many as
fit into the micro-batches of the trainer's own schedule. Generated pools have `LAYERS` layers; slots get their share of
the memory that the whole model leaves.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from relibra.cluster import Cluster, Dispatch, cluster_preset
from relibra.rl.batch.schedule import make_schedule
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.readers import open_trace
from relibra.routing.statistics import co_activation
from relibra.simulation import ModelShape, cut_model, memory_for_slots, model_shape

RECORDINGS = {
    "gpt-oss-20b": ("gpt_oss_20b_decode_topk.npz", 32),
    "deepseek-v2-lite": ("deepseek_v2_lite_esft_topk.npz", 64),
}
"""File and experts."""
COMMON = "qwen3-30b-a3b"
"""The common case, with generated routes."""
LAYERS = 4
SPREAD = 0.66
"""Of the log-popularity of a generated layer: with seed 0 a static skew of 1.28 on 8 ranks for `COMMON`."""
FILLS = np.arange(1.0, 0.5, -0.02)
"""Shares of all micro-batches' tokens: as many samples are drawn as the first of these that the schedule fits in."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A step on a machine of nodes of 8 H100.

    source   a recording, or a model whose routes are generated
    table    of results/step.json that the default's row is in
    full     samples for the tokens of all micro-batches are drawn, which then take some micro-batches more
    """

    source: str
    ranks: int
    dispatch: Dispatch
    tokens: int
    mini_batches: int
    micro_batches: int = 32
    seed: int = 0
    table: str = "default"
    full: bool = False

    @property
    def exchange(self) -> str:
        """Return "one node", or the dispatch between nodes."""
        return self.dispatch if self.ranks > 8 else "one node"

    @property
    def name(self) -> str:
        """Return what `--cells` looks for."""
        words = [self.source, f"{self.ranks} ranks", self.exchange]
        words += [f"{self.tokens} tokens", f"{self.micro_batches} micro-batches in {self.mini_batches}"]
        return ", ".join(words) + (f", seed {self.seed}" if self.seed else "")


def matrix() -> list[Cell]:
    """Return all cells, those with one row per node first; one node needs no dispatch."""
    machines: list[tuple[int, Dispatch]] = [(8, "hierarchical"), (16, "hierarchical"), (32, "hierarchical")]
    machines += [(16, "flat"), (32, "flat")]
    return [
        Cell(source=source, ranks=ranks, dispatch=dispatch, tokens=tokens, mini_batches=mini_batches)
        for ranks, dispatch in machines
        for source in (*RECORDINGS, COMMON)
        for mini_batches in (1, 4, 16)
        for tokens in (1024, 2048, 8192)
    ]


def quick() -> list[Cell]:
    """Return the cells of the table for users."""
    return [cell for cell in matrix() if (cell.tokens, cell.mini_batches, cell.dispatch) == (8192, 4, "hierarchical")]


def lost_once() -> list[Cell]:
    """Return three steps in which replicas that stay with their layer did not pay."""
    sizes: list[tuple[int, int, int, Dispatch]] = [
        (1024, 16, 4, "hierarchical"), (2048, 32, 8, "hierarchical"), (2048, 2, 1, "flat")
    ]  # fmt: skip
    return [
        Cell(
            source="gpt-oss-20b", ranks=16, dispatch=dispatch, tokens=tokens, mini_batches=mini_batches,
            micro_batches=micro_batches, table="lost", full=True,
        )
        for tokens, micro_batches, mini_batches, dispatch in sizes
    ]  # fmt: skip


def unseen() -> list[Cell]:
    """Return cells that no default was chosen on: more ranks, other models, other samples."""
    places: list[tuple[str, int, int]] = [
        (COMMON, 64, 0), ("deepseek-v2-lite", 64, 0), ("deepseek-v3", 64, 0), ("qwen3-235b-a22b", 32, 0),
        ("mixtral-8x7b", 8, 0), ("gpt-oss-20b", 16, 1), ("gpt-oss-20b", 32, 2), (COMMON, 8, 1), (COMMON, 16, 2),
    ]  # fmt: skip
    return [
        Cell(
            source=source,
            ranks=ranks,
            dispatch="hierarchical",
            tokens=tokens,
            mini_batches=4,
            seed=seed,
            table="unseen",
        )
        for source, ranks, seed in places
        for tokens in (2048, 8192)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """The step of a cell.

    whole        the model; model: its layers that have routes
    memory_gib   that the model leaves for slots in these layers
    """

    cell: Cell
    cluster: Cluster
    whole: ModelShape
    model: ModelShape
    demand: ScheduledDemand
    memory_gib: float


def make_case(cell: Cell, data: Path) -> Case:
    """Draw and schedule the samples of a cell.

    data   folder of the recordings
    """
    whole = model_shape(cell.source)
    pool = recorded_pool(cell.source, data) if cell.source in RECORDINGS else generated_pool(cell.source, cell.seed)
    demand = draw_step(pool, cell)
    cluster = replace(cluster_preset("h100x8", cell.ranks), dispatch=cell.dispatch)
    return Case(
        cell=cell,
        cluster=cluster,
        whole=whole,
        model=cut_model(whole, demand),
        demand=demand,
        memory_gib=memory_for_slots(demand, cluster, whole),
    )


@cache
def recorded_pool(name: str, data: Path) -> Demand:
    """Return the samples of a recording, with the pairs of experts that tokens pick together."""
    file, experts = RECORDINGS[name]
    trace = open_trace(data / file, experts)
    return replace(Demand.from_trace(trace), pairs_LEE=co_activation(trace))


@cache
def generated_pool(name: str, seed: int, samples: int = 192) -> Demand:
    """Return made-up samples of log-normal lengths, at most 1,024 tokens.

    A token picks the experts with the largest log-weight plus Gumbel noise: without replacement, by weight.
    """
    model, rng = model_shape(name), np.random.default_rng(seed)
    E, K = model.experts, model.top_k
    length_S = np.clip(rng.lognormal(np.log(500), 0.7, samples), 16, 1024).astype(np.int64)
    counts_SLE, pairs_LEE = np.zeros((samples, LAYERS, E), np.int32), np.zeros((LAYERS, E, E))
    for layer in range(LAYERS):
        log_weight_SE = rng.normal(scale=SPREAD, size=E) + rng.normal(scale=0.6, size=(samples, E))
        for s in range(samples):
            noisy_TE = log_weight_SE[s] + rng.gumbel(size=(length_S[s], E))
            picked_TE = np.zeros(noisy_TE.shape)
            np.put_along_axis(picked_TE, np.argpartition(-noisy_TE, K - 1, axis=1)[:, :K], 1.0, axis=1)
            counts_SLE[s, layer] = picked_TE.sum(axis=0)
            pairs_LEE[layer] += picked_TE.T @ picked_TE
    return Demand(
        counts_SLE=counts_SLE,
        pairs_LEE=pairs_LEE.astype(np.int64),
        layer_ids=np.arange(LAYERS, dtype=np.int32),
        sample_ids=np.arange(samples),
        top_k=K,
    )


def draw_step(pool: Demand, cell: Cell) -> ScheduledDemand:
    """Draw samples again until the micro-batches of a cell are full, and schedule them as the trainer does."""
    assert pool.top_k
    rng = np.random.default_rng(cell.seed)
    length_S = pool.counts_SLE[:, 0].sum(axis=1) // pool.top_k
    room = cell.ranks * cell.tokens * cell.micro_batches
    drawn_X = rng.integers(len(length_S), size=int(1.5 * room / length_S.mean()) + 100)
    filled_X = np.cumsum(length_S[drawn_X])
    for share in FILLS:
        chosen = drawn_X[: max(cell.mini_batches, int(np.searchsorted(filled_X, share * room)))]
        schedule = make_schedule(
            length_S[chosen],
            np.arange(len(chosen)),
            mini_batches=cell.mini_batches,
            micro_batch_tokens=cell.tokens,
            num_ranks=cell.ranks,
        )
        if cell.full or schedule.num_micro_batches <= cell.micro_batches:
            break
    scale = length_S[chosen].sum() / length_S.sum()
    demand = replace(
        pool,
        counts_SLE=pool.counts_SLE[chosen],
        sample_ids=np.arange(len(chosen)),
        pairs_LEE=None if pool.pairs_LEE is None else np.round(pool.pairs_LEE * scale).astype(np.int64),
    )
    scheduled = demand.with_schedule(schedule.micro_batch_S, schedule.rank_S, cell.ranks, schedule.num_micro_batches)
    return replace(scheduled, group_M=schedule.mini_batch_M if cell.mini_batches > 1 else None)
