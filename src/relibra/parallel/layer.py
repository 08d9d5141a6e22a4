"""One layer under a plan, or balanced live: dispatch, experts at home and of replicas, combine. Start with `run_layer`.

Forward is written out here; backward runs the same steps in reverse, by the autograd functions of `rows/dispatch.py`
(rows and their gradients) and `replicas/replica_gradients.py` (gradients of replicas return to the homes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Int32
from torch import Tensor

from relibra.parallel.balanced import BalancedEP, LayerInput, parameters_replaced
from relibra.parallel.canonical import CanonicalExperts
from relibra.parallel.micro_batch import PlannedMicroBatch
from relibra.parallel.replicas.replica_gradients import (
    AddReplicaGradients,
    GradientReturn,
    LayerReplicas,
    RefillSlots,
    ReturnReplicaGradients,
    ReturnWaitingGradients,
)
from relibra.parallel.rows.dispatch import combine_choices, combine_tokens, dispatch_choices, dispatch_tokens
from relibra.parallel.rows.exchange import AllToAll, all_gather, explain_peer_failure
from relibra.parallel.rows.live_rows import exchange_choices
from relibra.parallel.rows.row_lists import RowLists, row_lists
from relibra.parallel.rows.sorted_rows import SortedRows, slot_ends
from relibra.planning.traffic.rank_tables import Place, RankTables, home_tables
from relibra.replay.routers import is_recompute
from relibra.timeline import TimelineRecorder


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRun:
    """One layer in one micro-batch on this rank.

    ends_P     where the planned rows of each local slot end, see `SortedRows`
    replicas   set on all ranks if any rank has replicas of this layer in this micro-batch, idle ones in resident slots
               included (gradients may wait there); else None on all
    """

    layer: BalancedEP
    tables: RankTables
    lists: RowLists
    ends_P: Int32[Tensor, " P"]
    replicas: LayerReplicas | None
    recorder: TimelineRecorder

    def choice_exchange(self) -> AllToAll:
        """Return the exchange of one row per token-slot; other exchanges copy its group, place and recorder."""
        return AllToAll(
            send_R=self.tables.send_RP.sum(axis=1).tolist(),
            receive_R=self.tables.receive_RP.sum(axis=1).tolist(),
            group=self.layer.ep_mesh.get_group(),
            place=self.tables.place,
            all_stay=self.tables.all_stay and self.lists.live is None,
            ranks_per_node=self.tables.ranks_per_node,
            recorder=self.recorder,
        )


def run_layer(layer: BalancedEP, planned: PlannedMicroBatch, position: int, tokens: LayerInput) -> Tensor:
    """Run a layer: planned rows as the plan says, live ones (without recorded routes) at home, padding not at all.

    Collective.

    position   of the layer in the plan
    returns    the weighted expert output `[T, H]`, 0 for padding
    """
    kinds = planned.kinds_of(len(tokens.hidden_TH), position)
    output_TH = _run_planned(layer, planned, position, tokens)
    if planned.live_apart:
        tables, recorder = planned.tables_L[position], planned.pushes.recorder
        live_V = torch.zeros(0, dtype=torch.int64, device=output_TH.device) if kinds is None else kinds.live_V
        live_VH = run_at_home(
            layer,
            tokens.rows(live_V),
            tables.place,
            recorder,
            canonical=planned.canonical,
            ranks_per_node=tables.ranks_per_node,
        )
        output_TH = output_TH.index_copy(0, live_V, live_VH.to(output_TH.dtype))
    return output_TH


def _run_planned(layer: BalancedEP, planned: PlannedMicroBatch, position: int, tokens: LayerInput) -> Tensor:
    """Run the token-slots of the plan; push for this layer before, unless pushed early, and for the next one after."""
    planned.check_choices(position, tokens.experts_TK)
    tables, pushes = planned.tables_L[position], planned.pushes
    run = LayerRun(
        layer=layer,
        tables=tables,
        lists=planned.lists_L[position],
        ends_P=planned.ends_L[position],
        replicas=LayerReplicas(pushes, position) if pushes.has_replicas(position) else None,
        recorder=pushes.recorder,
    )
    if run.replicas is not None:
        run.replicas.push()
    output_TH = run_experts(run, tokens, canonical=planned.canonical)
    if not is_recompute():
        pushes.after_layer(position)
    return output_TH


def run_experts(run: LayerRun, tokens: LayerInput, *, canonical: bool) -> Tensor:
    """Dispatch rows, run the experts at home and the replicas, whose push has been started, and combine; collective."""
    return _run_canonical(run, tokens.hidden_TH, tokens.weights_TK) if canonical else _run_fast(run, tokens)


def _run_fast(run: LayerRun, tokens: LayerInput) -> Tensor:
    """Send each token once to each rank that computes it; results are weighted and added there."""
    choices, lists, live, order_Y = run.choice_exchange(), run.lists, None, None
    rows = SortedRows(lists.slot_Y, run.ends_P)
    if lists.live is not None:
        position_E = run.layer.positions_on(tokens.experts_TK.device)
        live = exchange_choices(
            lists.live, tokens.experts_TK, tokens.weights_TK, position_E, run.tables.num_homes, choices
        )
        rows, order_Y = rows.with_live(live.slot_Y, run.tables.num_homes, run.tables.num_home_rows)
        lists = lists.with_live(live.arrived_Y, order_Y)
    rows_YH, weight_Y1 = dispatch_tokens(lists, choices, tokens.hidden_TH, tokens.weights_TK)
    if live is not None and order_Y is not None:
        weight_Y1 = torch.cat([live.weight_Y1, weight_Y1]).index_select(0, order_Y)
    if run.replicas is None:
        rows = SortedRows(rows.slot_Y, rows.ends_P[: run.tables.num_homes])
        outputs: Sequence[Tensor] = [run.layer.run_rows(rows_YH, rows, weight_Y1)]
    else:
        num_live = 0 if live is None else len(live.slot_Y)
        outputs = _run_homes_and_replicas(run, run.replicas, rows_YH, rows, weight_Y1, num_live)
    return combine_tokens(lists, choices, outputs, len(tokens.hidden_TH))


def _run_homes_and_replicas(
    run: LayerRun, replicas: LayerReplicas, rows_YH: Tensor, rows: SortedRows, weight_Y1: Tensor, num_live: int
) -> Sequence[Tensor]:
    """Run the experts at home, while weights arrive, then the replicas; return consecutive parts of the results.

    num_live   live rows, all of them for experts at home
    """
    layer, homes, num_homes = run.layer, run.layer.homes(), run.tables.num_homes
    num_home_rows = num_live + run.tables.num_home_rows
    at_home, in_slots = slice(0, num_home_rows), slice(num_home_rows, len(rows_YH))
    anchor, *of_homes = AddReplicaGradients.apply(replicas.returns, list(homes), *homes.values())
    with parameters_replaced(layer.experts, dict(zip(homes, of_homes, strict=True))):
        outputs = [layer.run_rows(rows_YH[at_home], rows.of(slice(0, num_homes), at_home), weight_Y1[at_home])]
    trained = [name for name, home in homes.items() if home.requires_grad]
    weights = ReturnReplicaGradients.apply(replicas, trained, anchor)
    if in_slots.start < in_slots.stop:
        slots = slice(num_homes, len(rows.ends_P))
        with parameters_replaced(layer.experts, dict(zip(homes, weights, strict=True))):
            outputs.append(layer.run_rows(rows_YH[in_slots], rows.of(slots, in_slots), weight_Y1[in_slots]))
    return cast(Sequence[Tensor], RefillSlots.apply(replicas, len(outputs), *outputs, *weights))


def _run_canonical(run: LayerRun, hidden_TH: Tensor, weights_TK: Tensor) -> Tensor:
    """Send rows; results are weighted and added where the tokens came from, in a fixed order."""
    choices = run.choice_exchange()
    rows_YH = dispatch_choices(run.lists, choices, hidden_TH, weights_TK.shape[1])
    experts = CanonicalExperts(layer=run.layer, tables=run.tables, replicas=run.replicas)
    output_YH = experts(rows_YH, run.layer.homes())
    return combine_choices(run.lists, choices, output_YH, weights_TK)


def run_at_home(
    layer: BalancedEP,
    tokens: LayerInput,
    place: Place,
    recorder: TimelineRecorder,
    *,
    canonical: bool,
    ranks_per_node: int,
    waiting: GradientReturn | None = None,
) -> Tensor:
    """Run every token-slot at the home of its expert, as `all_to_all` does; collective.

    waiting   gradients that go home in the backward pass, with fast sums
    """
    with (
        recorder.record("at home", layer=place.layer_id, micro_batch=place.micro_batch),
        explain_peer_failure("the exchange of rows", place, range(layer.ep_mesh.size())),
    ):
        if not canonical:
            return layer.run_at_home(tokens) if waiting is None else _run_with_waiting(layer, tokens, waiting)
        tables = _count_home_tables(layer, tokens.experts_TK, place, ranks_per_node)
        lists = row_lists(tables, tokens.experts_TK.cpu().numpy(), tokens.hidden_TH.device)
        [ends_P] = slot_ends([tables], tokens.hidden_TH.device)
        run = LayerRun(layer=layer, tables=tables, lists=lists, ends_P=ends_P, replicas=None, recorder=recorder)
        return _run_canonical(run, tokens.hidden_TH, tokens.weights_TK)


def _run_with_waiting(layer: BalancedEP, tokens: LayerInput, waiting: GradientReturn) -> Tensor:
    """Run the layer at home; its backward pass sends complete sums of resident replicas home."""
    homes = layer.homes()
    trained = [name for name, home in homes.items() if home.requires_grad]
    anchor, *of_homes = AddReplicaGradients.apply(waiting, list(homes), *homes.values())
    with parameters_replaced(layer.experts, dict(zip(homes, of_homes, strict=True))):
        output_TH = layer.run_at_home(tokens)
    result_TH: Tensor = ReturnWaitingGradients.apply(waiting, trained, output_TH, anchor)
    return result_TH


def _count_home_tables(layer: BalancedEP, experts_TK: Tensor, place: Place, ranks_per_node: int) -> RankTables:
    """Exchange the counts of token-slots per expert; return the tables of this rank without replicas."""
    map_E = layer.physical_to_logical_E
    own_E = torch.bincount(experts_TK.flatten(), minlength=len(map_E))
    counts_RE = all_gather(own_E, layer.ep_mesh.get_group(), "the exchange of counts", place)
    return home_tables(torch.stack(counts_RE).cpu().numpy(), map_E, place, ranks_per_node)
