"""One layer of a planned micro-batch: its token-slots to homes and replicas and back, forward and backward."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from relibra.parallel.balanced import BalancedEP
from relibra.parallel.canonical import CanonicalExperts
from relibra.parallel.replicas.replica_slots import LayerReplicas, parameters_replaced
from relibra.parallel.rows.dispatch import dispatch_and_combine
from relibra.parallel.rows.exchange import gathered
from relibra.parallel.rows.rank_tables import Place, RankTables, home_tables
from relibra.parallel.rows.row_lists import RowLists, row_lists


def run_planned(
    layer: BalancedEP,
    tables: RankTables,
    lists: RowLists,
    replicas: LayerReplicas | None,
    hidden_TH: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Run the token-slots of the plan; collective.

    lists      tokens sent once: sums are fast; each token-slot a row: sums are canonical
    replicas   of this layer on any rank; None: nobody has any
    """
    if replicas is not None:
        replicas.fill()
    if lists.once is None:
        compute = partial(_canonical, layer, tables, replicas)
    else:
        compute = partial(_fast, layer, tables, lists, replicas)
    group, recorder = layer.ep_mesh.get_group(), layer.recorder
    return dispatch_and_combine(tables, lists, hidden_TH, weights_TK, group, recorder, compute)


def run_at_home_canonically(
    layer: BalancedEP, layer_id: int, micro_batch: int, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run rows without a plan with canonical sums: like `all_to_all`, with an exchange of counts; collective."""
    group = layer.ep_mesh.get_group()
    E = len(layer.physical_to_logical_E)
    own_E = torch.bincount(experts_TK.flatten(), minlength=E)
    place = Place(dist.get_rank(group), layer_id, micro_batch)
    counts_RE = gathered(own_E, group, "the exchange of counts", place)
    tokens_RE = torch.stack(counts_RE).cpu().numpy()
    tables = home_tables(tokens_RE, layer.physical_to_logical_E, dist.get_rank(group), layer_id, micro_batch)
    lists = row_lists(tables, experts_TK.cpu().numpy(), hidden_TH.device)
    return run_planned(layer, tables, lists, None, hidden_TH, weights_TK)


def _fast(
    layer: BalancedEP,
    tables: RankTables,
    lists: RowLists,
    replicas: LayerReplicas | None,
    rows_YH: Tensor,
    weight_Y1: Tensor,
) -> Tensor:
    if replicas is None:
        return layer.run_rows(rows_YH, lists.slot_Y, weight_Y1)
    n, homes = tables.num_home_rows, layer.homes()
    anchor, held = replicas.hold(homes)
    with parameters_replaced(layer.experts, held):
        output_YH = layer.run_rows(rows_YH[:n], lists.slot_Y[:n], weight_Y1[:n])  # while replicas arrive
    spare = replicas.launch(anchor, [name for name, home in homes.items() if home.requires_grad])
    if n < len(rows_YH):
        with parameters_replaced(layer.experts, spare):
            spare_slot_Y = lists.slot_Y[n:] - tables.num_homes
            of_replicas_YH = layer.run_rows(rows_YH[n:], spare_slot_Y, weight_Y1[n:])
        output_YH = torch.cat([output_YH, of_replicas_YH])
    return replicas.tie(output_YH, spare)


def _canonical(
    layer: BalancedEP, tables: RankTables, replicas: LayerReplicas | None, rows_YH: Tensor, _ones_Y1: Tensor
) -> Tensor:
    """Run the experts; results are weighted where the tokens came from."""
    experts = CanonicalExperts(layer=layer, tables=tables, replicas=replicas)
    return experts(rows_YH, layer.homes())
