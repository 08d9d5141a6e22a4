"""`balance_live`: balanced experts without recorded routes, as in pre-training, SFT and RL without replay.

Each forward pass of each layer decides for itself, after its router (as UltraEP and MoonEP do): the ranks exchange how
many token-slots each expert gets, every rank solves the same placement of replicas (`planning/baselines/live.py`), and
the layer runs as under a plan (`layer.py`). Counts, solver, row lists and pushes are on the critical path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64
from numpy import ndarray
from torch import Tensor, nn

from relibra.cluster import Dispatch
from relibra.errors import EngineError
from relibra.parallel.agreement import Agreement, Point, digest_word, refuse_differences
from relibra.parallel.balanced import (
    BalancedEP,
    LayerInput,
    agreement_of,
    balanced_layers,
    expert_shapes,
    group_state_of,
)
from relibra.parallel.canonical import Sums, chunk_of
from relibra.parallel.layer import LayerRun, run_experts
from relibra.parallel.replicas.push_schedule import PushSchedule
from relibra.parallel.replicas.replica_gradients import LayerReplicas
from relibra.parallel.replicas.replica_slots import ReplicaSlots
from relibra.parallel.rows.exchange import all_gather
from relibra.parallel.rows.prepared_rows import prepare_rows
from relibra.parallel.rows.row_lists import RowLists
from relibra.parallel.rows.sorted_rows import slot_ends
from relibra.planning.baselines.live import TOLERANCE, solve_layer
from relibra.planning.budget import MOST_SLOTS, MOST_TOLERANCE
from relibra.planning.traffic.rank_tables import Place, RankTables, layer_tables
from relibra.replay import BatchRoutes
from relibra.timeline import Timeline, TimelineRecorder

MOST_EVENTS = 1 << 16
"""Events of the timeline that are kept, the latest: a whole training may be inside one `balance_live`."""


class LiveSkew(NamedTuple):
    """Token-slots of the busiest rank / those of the mean rank, over all layers and passes so far.

    before   with every expert at its home
    after    with replicas
    """

    before: float
    after: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Live:
    """What does not change while a model balances live.

    layers           by position, with the decoder layer of each
    ranks_per_node   copies stay inside a node
    chunk            token-slots of a chunk of canonical sums; None: fast sums
    """

    layers: list[BalancedEP]
    layer_ids: list[int]
    slots: ReplicaSlots
    ranks_per_node: int
    tolerance: float
    dispatch: Dispatch
    chunk: int | None
    agreement: Agreement
    recorder: TimelineRecorder


class LiveBalancing:
    """Live balancing of a model, as `balance_live` returns it.

    num_copies   replicas of all ranks so far, each for one pass of a layer
    """

    def __init__(self, live: _Live) -> None:
        """Start before any forward pass."""
        self.num_copies = 0
        self._live = live
        self._last_position = len(live.layers)
        self._loads_3 = np.zeros(3)  # of the busiest rank before and after, and of the mean rank

    def skew(self) -> LiveSkew:
        """Return what balancing has reached so far; the same on all ranks. 1 before the first pass."""
        before, after, mean = self._loads_3.tolist()
        return LiveSkew(before / mean, after / mean) if mean else LiveSkew(1.0, 1.0)

    @property
    def token_slots(self) -> int:
        """Return token-slots of all ranks, layers and passes so far; which rank computes each was unknown before."""
        return round(self._loads_3[2] * self._live.slots.state.num_ranks)

    def waited(self) -> dict[str, float]:
        """Return this rank's seconds until counts were there, and until replicas were solved and rows listed."""
        return {name: self._live.recorder.seconds(f"wait {name}") for name in ("counts", "solve")}

    def timeline(self) -> Timeline:
        """Return the latest events of this rank; their micro-batches are forward passes, recomputation included."""
        return self._live.recorder.timeline()

    def run_layer(self, position: int, tokens: LayerInput) -> Tensor:
        """Balance one layer for these tokens, and run it; collective."""
        live, layer = self._live, self._live.layers[position]
        place = self._begin(position)
        with live.recorder.record("wait counts", layer=place.layer_id, micro_batch=place.micro_batch):
            experts_TK = tokens.experts_TK.cpu()  # the only wait for the device: the host counts and lists the rest
            tokens_RE = _exchange_counts(live, experts_TK, place)
        with live.recorder.record("wait solve", layer=place.layer_id, micro_batch=place.micro_batch):
            tables = self._solve(layer, tokens_RE, place)
            pushes = PushSchedule(
                slots=live.slots, tables_L=[tables], homes_L=[layer.homes], may_push_early=False, recorder=live.recorder
            )
            replicas = LayerReplicas(pushes, 0) if pushes.has_replicas(0) else None
            if replicas is not None:
                replicas.push()
            lists = _list_rows(live, tables, experts_TK)
        [ends_P] = slot_ends([tables], live.slots.state.device)
        run = LayerRun(
            layer=layer, tables=tables, lists=lists, ends_P=ends_P, replicas=replicas, recorder=live.recorder
        )
        return run_experts(run, tokens, canonical=live.chunk is not None)

    def _begin(self, position: int) -> Place:
        """Return the place of this pass over a layer, which no other pass has; count forward passes.

        A layer that does not come after the one that ran before begins the next forward pass.
        """
        state = self._live.slots.state
        if position <= self._last_position:
            state.live_passes += 1
        self._last_position = position
        return Place(state.rank, self._live.layer_ids[position], state.live_passes)

    def _solve(self, layer: BalancedEP, tokens_RE: Int64[ndarray, "R E"], place: Place) -> RankTables:
        """Return the tables of a layer with its replicas, alike on all ranks; count loads and copies.

        tokens_RE   token-slots of each expert from each rank
        """
        live, map_E, load_E = self._live, layer.physical_to_logical_E, tokens_RE.sum(axis=0)
        R, E = tokens_RE.shape
        home_E = np.argsort(map_E, kind="stable") // (E // R)
        replica_RB, quota_RB = solve_layer(
            load_E, home_E, R, live.ranks_per_node, slots=live.slots.num_slots, tolerance=live.tolerance
        )
        tables = layer_tables(tokens_RE, map_E, replica_RB, quota_RB, live.ranks_per_node, place, live.chunk)
        before_R = np.bincount(home_E, weights=load_E, minlength=R)
        after_R = before_R.copy()
        for push in tables.pushes:  # not the quotas, which canonical sums round to chunks
            after_R[push.replica] += push.tokens
            after_R[push.home] -= push.tokens
        self._loads_3 += before_R.max(), after_R.max(), before_R.mean()
        self.num_copies += len(tables.pushes)
        return tables


@contextmanager
def balance_live(
    model: nn.Module,
    *,
    slots: int = 1,
    ranks_per_node: int | None = None,
    tolerance: float = TOLERANCE,
    sums: Sums = "fast",
    dispatch: Dispatch = "flat",
) -> Iterator[LiveBalancing]:
    """Balance the experts of a model that was loaded with `ep_implementation="relibra"`, without recorded routes.

    Collective over the expert-parallel group; the first time for a model over all ranks. Inside, every forward pass is
    balanced by its own routes; call its backward pass inside too. Results are those without balancing, up to the order
    of sums.

    slots            replicas per rank; all layers share them
    ranks_per_node   ranks that are one node, inside which copies stay; None: the whole group
    tolerance        share by which the busiest rank may exceed the lowest load that copies can reach, for fewer copies
    sums, dispatch   as for `execute_plan`, and `Cluster.dispatch`
    raises           EngineError when the model cannot be balanced, is executing a plan, or ranks differ in a setting;
                     and on all ranks when they run different layers or passes

        with balance_live(model, slots=2) as live:
            for batch in batches:
                loss_of(model, batch).backward()
        print(live.skew())
    """
    live = _begin_live(model, slots, ranks_per_node, tolerance, sums, dispatch=dispatch)
    balancing = LiveBalancing(live)
    try:
        for position, layer in enumerate(live.layers):
            layer.runner = partial(balancing.run_layer, position)
        yield balancing
        live.agreement.reach(Point.LIVE_END)
    finally:
        for layer in live.layers:
            layer.runner = None
        live.slots.forget_weights()


def _begin_live(
    model: nn.Module, slots: int, ranks_per_node: int | None, tolerance: float, sums: Sums, *, dispatch: Dispatch
) -> _Live:
    """Check the settings, and agree on them; collective."""
    by_layer = balanced_layers(model)
    layers = list(by_layer.values())
    if any(layer.runner is not None for layer in layers):
        raise EngineError("the model executes a plan or balances live already: leave that context first")
    num_ranks = layers[0].ep_mesh.size()
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    _check_settings(slots, per_node, num_ranks, tolerance, dispatch)
    agreement = agreement_of(layers)
    homes = np.stack([layer.physical_to_logical_E for layer in layers]).astype("<i8").tobytes()
    settings = repr((slots, per_node, float(tolerance), sums, dispatch)).encode()
    told_RX = agreement.reach(Point.LIVE, own=[digest_word(homes), digest_word(settings)])
    refuse_differences(Place(agreement.rank, -1, -1), told_RX, ("homes of experts", "settings of balance_live"))
    if slots and len(shapes := expert_shapes(layers)) > 1:
        raise EngineError(
            f"balance_live: the model has experts of different shapes, {shapes}: all layers use the same replica "
            "slots, so pass slots=0, or train without balancing"
        )
    return _Live(
        layers=layers,
        layer_ids=list(by_layer),
        slots=ReplicaSlots(group_state_of(model, layers), slots),
        ranks_per_node=per_node,
        tolerance=tolerance,
        dispatch=dispatch,
        chunk=chunk_of(sums),
        agreement=agreement,
        recorder=TimelineRecorder(dist.get_rank(), dist.get_world_size(), most=MOST_EVENTS),
    )


def _check_settings(slots: int, per_node: int, num_ranks: int, tolerance: float, dispatch: Dispatch) -> None:
    """Raise EngineError for a setting that is not allowed."""
    for name, value, is_allowed, allowed in (
        ("slots", slots, isinstance(slots, int) and 0 <= slots <= MOST_SLOTS, f"whole numbers from 0 to {MOST_SLOTS}"),
        ("tolerance", tolerance, 0 <= tolerance <= MOST_TOLERANCE, f"shares from 0 to {MOST_TOLERANCE}"),
        ("ranks_per_node", per_node, per_node > 0 and num_ranks % per_node == 0, f"divisors of {num_ranks} ranks"),
        ("dispatch", dispatch, dispatch in get_args(Dispatch), ", ".join(get_args(Dispatch))),
    ):
        if not is_allowed:
            raise EngineError(f"balance_live: {name} is {value!r}: allowed are {allowed}")


def _exchange_counts(live: _Live, experts_TK: Int64[Tensor, "T K"], place: Place) -> Int64[ndarray, "R E"]:
    """Return the token-slots of each expert from each rank; collective.

    experts_TK   on the CPU
    raises   EngineError, on all ranks, when they run different layers or passes
    """
    num_experts = len(live.layers[0].physical_to_logical_E)
    counts_E = torch.bincount(experts_TK.flatten(), minlength=num_experts)
    told_X = torch.cat([torch.tensor([place.layer_id, place.micro_batch, torch.is_grad_enabled()]), counts_E])
    told_RX = torch.stack(all_gather(told_X, live.agreement.group, "the exchange of counts", place))
    refuse_differences(place, told_RX[:, :3], ("the layer", "the forward pass", "gradients"))
    return told_RX[:, 3:].numpy()


def _list_rows(live: _Live, tables: RankTables, experts_TK: Int64[Tensor, "T K"]) -> RowLists:
    """Return the row lists of a layer; collective.

    experts_TK   on the CPU
    """
    num_rows, num_experts = len(experts_TK), len(tables.tokens_E)
    routes = BatchRoutes(
        experts_TLK=experts_TK.to(torch.uint8 if num_experts <= 256 else torch.int32).unsqueeze(1),
        valid_T=torch.ones(num_rows, dtype=torch.bool),
        layer_ids=(tables.place.layer_id,),
        num_experts=num_experts,
        sample_T=torch.zeros(num_rows, dtype=torch.int64),
        row_T=torch.arange(num_rows),
        sample_ids=(0,),
        weight_versions=(0,),
        fallback_samples=(),
        coverage=1.0,
    )
    pinned = live.slots.state.device.type == "cuda"  # from other memory the copy would wait for the work before it
    rows = prepare_rows([tables], routes, live.agreement.group, dispatch=live.dispatch, pinned=pinned)
    [lists] = rows.lists_on(live.slots.state.device, None)
    return lists
