"""Cells of `relibra bench iteration`: generated steps of groups of responses, with given skew and lengths.

Routes are generated at the sizes of Qwen3-30B-A3B for a few layers, which then stand for all: a plan is made for these,
and its layers are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64
from numpy import ndarray

from relibra.cluster import Cluster, Dispatch, cluster_preset
from relibra.planning.plan import StepPlan
from relibra.rl.batch.schedule import SharedPrompts, make_schedule
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.simulation import ModelShape, cut_model, memory_for_slots, model_shape

MODEL = "qwen3-30b-a3b"
LAYERS, GROUP = 4, 16
KINDS, TOKENS_PER_KIND = 48, 512
"""Kinds of texts that prompts and responses are drawn from, and tokens that are drawn of each."""
SPREAD = {(1.1, 8): 0.23, (1.3, 8): 0.84, (1.6, 8): 1.57, (1.1, 16): 0.0, (1.3, 16): 0.42, (1.6, 16): 0.77}
"""Of the log-popularity of experts, by static skew and ranks."""
TOKENS = (8192, 16_384)
"""Most tokens of a rank in a micro-batch: each row takes what is fastest for it."""
LENGTHS = ((256, 4096), (1024, 3072))
"""Tokens of a prompt and mean tokens of a response."""
STEP_TOKENS = 1 << 18
"""Of a rank in a step, about."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A step on nodes of 8 H100; a skew of about `skew` without a plan."""

    ranks: int
    dispatch: Dispatch
    skew: float
    mini_batches: int
    prompt: int
    response: int

    @property
    def exchange(self) -> str:
        """Return "one node", or the dispatch between nodes."""
        return self.dispatch if self.ranks > 8 else "one node"

    @property
    def name(self) -> str:
        """Return what `--cells` looks for."""
        steps = f"{self.mini_batches} mini-batch" + "es" * (self.mini_batches > 1)
        return f"{self.ranks} ranks, {self.exchange}, skew {self.skew}, {steps}, {self.prompt} / {self.response}"


def matrix() -> list[Cell]:
    """Return all cells; one node needs no dispatch."""
    machines: tuple[tuple[int, Dispatch], ...] = ((8, "flat"), (16, "hierarchical"), (16, "flat"))
    return [
        Cell(ranks=ranks, dispatch=dispatch, skew=skew, mini_batches=number, prompt=prompt, response=response)
        for ranks, dispatch in machines
        for skew in (1.1, 1.3, 1.6)
        for number in (1, 4)
        for prompt, response in LENGTHS
    ]


def quick() -> list[Cell]:
    """Return the common case: one node, a skew of 1.3, all numbers of mini-batches and lengths."""
    return [cell for cell in matrix() if (cell.ranks, cell.skew) == (8, 1.3)]


class Texts(NamedTuple):
    """Shares of token-slots per kind of text, layer and expert, and of tokens that pick two experts together."""

    share_NLE: Float64[ndarray, "N L E"]
    pairs_NLEE: Float64[ndarray, "N L E E"]


@cache
def draw_texts(spread: float, seed: int = 0) -> Texts:
    """Draw tokens of each kind of text: a token picks the experts with the largest log-weight plus Gumbel noise."""
    model, rng = model_shape(MODEL), np.random.default_rng(seed)
    E, K = model.experts, model.top_k
    share_NLE, pairs_NLEE = np.zeros((KINDS, LAYERS, E)), np.zeros((KINDS, LAYERS, E, E))
    for layer in range(LAYERS):
        log_weight_NE = spread * rng.normal(size=E) + 0.6 * rng.normal(size=(KINDS, E))
        for n in range(KINDS):
            noisy_TE = log_weight_NE[n] + rng.gumbel(size=(TOKENS_PER_KIND, E))
            picked_TE = np.zeros(noisy_TE.shape)
            np.put_along_axis(picked_TE, np.argpartition(-noisy_TE, K - 1, axis=1)[:, :K], 1.0, axis=1)
            share_NLE[n, layer] = picked_TE.mean(axis=0) / K
            pairs_NLEE[n, layer] = picked_TE.T @ picked_TE / TOKENS_PER_KIND
    return Texts(share_NLE=share_NLE, pairs_NLEE=pairs_NLEE)


def draw_lengths(cell: Cell, seed: int = 0) -> Int64[ndarray, " S"]:
    """Return the tokens of all responses of a step, log-normal with the cell's mean, at most about twice that."""
    groups = max(1, STEP_TOKENS * cell.ranks // (GROUP * (cell.prompt + cell.response)))
    drawn = np.minimum(np.random.default_rng(seed).lognormal(0.0, 0.4, GROUP * groups), 2.0)
    return np.maximum(1, np.rint(drawn / drawn.mean() * cell.response)).astype(np.int64)


def draw_demand(cell: Cell, tokens: int, *, once: bool, seed: int = 0) -> ScheduledDemand:
    """Return the token-slots of a step under the schedule of the trainer.

    tokens   most of a rank in a micro-batch
    once     responses of a group that are trained together feed their prompt once, and are one sample
    """
    model, texts, rng = model_shape(MODEL), draw_texts(SPREAD[cell.skew, cell.ranks]), np.random.default_rng(seed + 1)
    own_S = draw_lengths(cell, seed)
    group_S = np.arange(len(own_S)) // GROUP
    kind_S, of_prompt_S = rng.integers(KINDS, size=len(own_S)), rng.integers(KINDS, size=group_S[-1] + 1)[group_S]
    prompt_S = np.full(len(own_S), cell.prompt)
    made = make_schedule(
        prompt_S + own_S,
        rng.permutation(int(group_S[-1]) + 1)[group_S],
        mini_batches=cell.mini_batches,
        micro_batch_tokens=tokens,
        num_ranks=cell.ranks,
        prompts=SharedPrompts(group_S, prompt_S) if once else None,
    )
    fed_S = np.where(made.leads_S, prompt_S, 0)
    tokens_SN = np.zeros((len(own_S), KINDS), np.int64)
    np.add.at(tokens_SN, (np.arange(len(own_S)), kind_S), own_S)
    np.add.at(tokens_SN, (np.arange(len(own_S)), of_prompt_S), fed_S)
    pairs_LEE = np.einsum("n,nlef->lef", tokens_SN.sum(axis=0), texts.pairs_NLEE)
    demand = Demand(
        counts_SLE=_rounded(model.top_k * np.einsum("sn,nle->sle", tokens_SN, texts.share_NLE)),
        pairs_LEE=np.rint(pairs_LEE).astype(np.int64),
        layer_ids=np.arange(LAYERS, dtype=np.int32),
        sample_ids=np.arange(len(own_S)),
        top_k=model.top_k,
        attended_S=(prompt_S + own_S) ** 2 - (prompt_S - fed_S) ** 2 if once else None,
    )
    scheduled = demand.with_schedule(made.micro_batch_S, made.rank_S, cell.ranks, made.num_micro_batches)
    scheduled = replace(scheduled, group_M=made.mini_batch_M if cell.mini_batches > 1 else None)
    return scheduled.merged(made.piece_S)[0] if once and made.piece_S is not None else scheduled


def _rounded(expected_SLE: Float64[ndarray, "S L E"]) -> Int32[ndarray, "S L E"]:
    """Return whole numbers with the same sums over experts: the largest rests are rounded up."""
    counts_SLE = np.floor(expected_SLE)
    left_SL = np.rint(expected_SLE.sum(axis=2) - counts_SLE.sum(axis=2)).astype(np.int64)
    order_SLE = np.argsort(np.argsort(counts_SLE - expected_SLE, axis=2, kind="stable"), axis=2)
    return (counts_SLE + (order_SLE < left_SL[:, :, None])).astype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """The step of a cell, with prompts repeated or once.

    tokens       most of a rank in a micro-batch
    whole        the model; part: its layers that are planned
    memory_gib   that the model leaves for slots in these layers
    """

    cell: Cell
    tokens: int
    cluster: Cluster
    whole: ModelShape
    part: ModelShape
    demand: ScheduledDemand
    memory_gib: float


def make_case(cell: Cell, tokens: int, *, once: bool) -> Case:
    """Draw and schedule the samples of a cell; once: a piece holds its prompt once."""
    whole = model_shape(MODEL)
    demand = draw_demand(cell, tokens, once=once)
    cluster = replace(cluster_preset("h100x8", cell.ranks), dispatch=cell.dispatch)
    return Case(
        cell=cell,
        tokens=tokens,
        cluster=cluster,
        whole=whole,
        part=cut_model(whole, demand),
        demand=demand,
        memory_gib=memory_for_slots(demand, cluster, whole),
    )


def repeat_layers(plan: StepPlan, demand: ScheduledDemand, layers: int) -> tuple[StepPlan, ScheduledDemand]:
    """Return a plan and its scheduled demand with their layers repeated until there are so many."""
    of_L = np.arange(layers) % len(plan.layer_ids)
    per_layer = {name: getattr(plan, name)[of_L] for name in ("physical_to_logical_map", "previous_map")}
    per_pass = {name: getattr(plan, name)[:, of_L] for name in ("replica_MLRB", "quota_MLRB", "bound_ML")}
    whole = demand.of_layers(of_L)
    number_L = np.arange(layers, dtype=np.int32)
    plan = replace(plan, **per_layer, **per_pass, layer_ids=number_L, demand_digest="")
    return plan, replace(whole, layer_ids=number_L)
