"""`relocate`: move experts to other homes, with their gradients and optimizer states.

The rows of an expert in a parameter, in its gradient and in each optimizer state of its shape travel together, as
bytes; counts follow from the old and the new map. They are written in place, so FSDP and the optimizer keep the same
tensors, and only after a collective has confirmed that all rows of the layer have arrived on all ranks: a transfer that
fails leaves its layer as it was; layers before that one have moved.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Int64
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.parallel.agreement import Agreement, Point
from relibra.parallel.balanced import BalancedEP, agreement_of, balanced_layers
from relibra.parallel.homes.home_shards import StoredRows, home_mesh, home_ranks, rows_by_expert
from relibra.parallel.rows.exchange import all_gather, explain_peer_failure
from relibra.planning.traffic.rank_tables import Place
from relibra.replay.device_copies import upload


@dataclass(frozen=True, kw_only=True)
class Relocation:
    """What a relocation moved.

    experts      experts of all layers and ranks that changed their position
    sent_bytes   of this rank to others
    seconds      on this rank, with its waits
    """

    experts: int
    sent_bytes: int
    seconds: float


def relocate(
    model: nn.Module, physical_to_logical_map: Int[ndarray, "L E"], optimizer: torch.optim.Optimizer | None = None
) -> Relocation:
    """Move experts to the positions of a map, between two steps; collective over all ranks of the model.

    Additional memory: the rows of one layer that this rank sends and receives, of all tensors together.

    physical_to_logical_map   logical expert at each position, a permutation per layer; layers as in `balanced_layers`
    optimizer                 the one that trains the experts; its state follows them. None: there is none yet
    raises                    EngineError before anything moves when maps differ between ranks or are no permutations,
                              a plan is being executed, layers balance live, gradients wait to be reduced, or the
                              optimizer keeps a state that cannot be cut by experts; and when a transfer fails
    """
    start = time.perf_counter()
    layers = balanced_layers(model)
    agreement = agreement_of(list(layers.values()))
    agreement.reach(Point.RELOCATE)
    group = _group(next(iter(layers.values())))
    wanted_LE = np.asarray(physical_to_logical_map)
    refusal: EngineError | None = None
    tensors: dict[int, list[StoredRows]] = {}
    try:
        _check(layers, wanted_LE)
        tensors = {layer_id: rows_by_expert(layer_id, layer, optimizer) for layer_id, layer in layers.items()}
    except EngineError as error:
        refusal = error  # raised after the exchange of agreement, so that no rank waits for this one
    _check_agreement(layers, wanted_LE, tensors, refusal, group, agreement)
    experts = sent_bytes = 0
    for (layer_id, layer), wanted_E in zip(layers.items(), wanted_LE.astype(np.int64), strict=True):
        moved = int((wanted_E != layer.physical_to_logical_E).sum())
        if moved:
            sent_bytes += _relocate_layer(layer_id, layer, wanted_E, tensors[layer_id], group)
            experts += moved
    return Relocation(experts=experts, sent_bytes=sent_bytes, seconds=time.perf_counter() - start)


class _Moves(NamedTuple):
    """Rows of one layer that this rank sends and receives, both sorted by rank of the group, then by new position.

    leave_X, arrive_Y            local rows
    num_sent_R, num_received_R   how many of them go to, or come from, each rank of the group
    """

    leave_X: Int64[ndarray, " X"]
    arrive_Y: Int64[ndarray, " Y"]
    num_sent_R: Int64[ndarray, " R"]
    num_received_R: Int64[ndarray, " R"]


def _moves(old_E: ndarray, new_E: ndarray, rank_E: ndarray, row_E: ndarray, own: int, num_ranks: int) -> _Moves:
    """Return the moves of one rank.

    old_E, new_E     logical expert at each position
    rank_E, row_E    rank of the group that stores each position, and the local row there
    """
    to_X = np.flatnonzero(old_E != new_E)  # new positions
    from_X = np.argsort(old_E)[new_E[to_X]]  # old positions of the same experts
    sends, receives = rank_E[from_X] == own, rank_E[to_X] == own
    by_target = np.argsort(rank_E[to_X[sends]], kind="stable")
    by_source = np.argsort(rank_E[from_X[receives]], kind="stable")
    return _Moves(
        leave_X=row_E[from_X[sends][by_target]],
        arrive_Y=row_E[to_X[receives][by_source]],
        num_sent_R=np.bincount(rank_E[to_X[sends]], minlength=num_ranks),
        num_received_R=np.bincount(rank_E[from_X[receives]], minlength=num_ranks),
    )


def _relocate_layer(
    layer_id: int, layer: BalancedEP, wanted_E: ndarray, tensors: list[StoredRows], group: dist.ProcessGroup
) -> int:
    """Move the rows of one layer and set its map; return the bytes sent to other ranks."""
    (global_rank_E, row_E), own = home_ranks(layer), dist.get_rank(group)
    number_of = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
    rank_E = np.array([number_of[rank] for rank in global_rank_E.tolist()])
    moves = _moves(layer.physical_to_logical_E, wanted_E, rank_E, row_E, own, len(number_of))
    device = torch.device(layer.ep_mesh.device_type)
    width = sum(stored.row_bytes for stored in tensors)
    sent = torch.empty((len(moves.leave_X), width), dtype=torch.uint8, device=device)
    received = torch.empty((len(moves.arrive_Y), width), dtype=torch.uint8, device=device)
    leave_X, arrive_Y = _on_devices(moves.leave_X, tensors), _on_devices(moves.arrive_Y, tensors)
    for stored, columns in _columns(tensors):
        rows = stored.rows[leave_X[stored.rows.device]].reshape(len(sent), prod(stored.rows.shape[1:]))
        sent[:, columns] = rows.view(torch.uint8)
    place = Place(dist.get_rank(), layer_id, -1)
    with explain_peer_failure("moving experts (the layer is unchanged)", place, list(number_of)):
        dist.all_to_all_single(received, sent, moves.num_received_R.tolist(), moves.num_sent_R.tolist(), group=group)
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        dist.all_reduce(arrived, group=group)
        arrived.item()  # the only wait on an accelerator
    for stored, columns in _columns(tensors):
        rows = received[:, columns].clone(memory_format=torch.contiguous_format).view(stored.rows.dtype)
        rows = rows.reshape(len(received), *stored.rows.shape[1:])
        there = stored.rows.device
        stored.rows[arrive_Y[there]] = rows if there == device else rows.to(there)
    layer.physical_to_logical_E = wanted_E.copy()
    return width * int(moves.num_sent_R.sum() - moves.num_sent_R[own])


def _on_devices(numbers: ndarray, tensors: list[StoredRows]) -> dict[torch.device, Tensor]:
    """Return numbers on each device that has rows, uploaded once, without a wait."""
    return {device: upload(torch.from_numpy(numbers), device) for device in {stored.rows.device for stored in tensors}}


def _columns(tensors: list[StoredRows]) -> Iterator[tuple[StoredRows, slice]]:
    """Yield each tensor with the bytes that it takes of an expert's row in the exchange."""
    end = 0
    for stored in tensors:
        start, end = end, end + stored.row_bytes
        yield stored, slice(start, end)


def _check(layers: dict[int, BalancedEP], wanted_LE: ndarray) -> None:
    """Raise EngineError for a map or a model that no rank can start with."""
    num_experts = len(next(iter(layers.values())).physical_to_logical_E)
    if wanted_LE.shape != (len(layers), num_experts):
        raise EngineError(
            f"the map of homes has shape {wanted_LE.shape}, the model has {len(layers)} layers of {num_experts} "
            "experts: pass one row per layer and one column per position"
        )
    for (layer_id, layer), wanted_E in zip(layers.items(), wanted_LE, strict=True):
        if not np.array_equal(np.sort(wanted_E), np.arange(num_experts)):
            raise EngineError(
                f"layer {layer_id}: the map of homes {wanted_E.tolist()} is no permutation of 0 to {num_experts - 1}: "
                "give each expert one position"
            )
        if layer.runner is not None:
            raise EngineError("the model is executing a plan, or balances live: leave that context before experts move")
        if _has_unreduced_gradients(layer.experts):
            raise EngineError(
                f"layer {layer_id}: gradients of earlier micro-batches wait to be reduced "
                "(set_requires_gradient_sync(False)): move experts between steps"
            )


def _has_unreduced_gradients(experts: Any) -> bool:
    """Return whether FSDP keeps unsharded gradients, which `parameter.grad` does not show: there is no public API."""
    state = experts._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # newer and older torch
    parameters = [p for group in groups for p in group.fsdp_params]
    unsharded = [getattr(p, "_unsharded_param", None) for p in parameters]  # absent before the first pass
    return any(p.unsharded_accumulated_grad is not None for p in parameters) or any(
        p is not None and p.grad is not None for p in unsharded
    )


def _group(layer: BalancedEP) -> dist.ProcessGroup:
    """Return the group of all ranks that store experts of a layer, including data-parallel replicas."""
    mesh = home_mesh(layer)
    if mesh.size() == layer.ep_mesh.size():
        return layer.ep_mesh.get_group()
    if mesh.size() != dist.get_world_size():
        raise EngineError(
            f"experts are sharded over {mesh.size()} of {dist.get_world_size()} ranks in several expert-parallel "
            "groups, and relocation does not support pipeline stages yet: use pp_size=1"
        )
    assert dist.group.WORLD is not None, "a mesh needs a process group"
    return dist.group.WORLD


def _check_agreement(
    layers: dict[int, BalancedEP],
    wanted_LE: ndarray,
    tensors: dict[int, list[StoredRows]],
    refusal: EngineError | None,
    group: dist.ProcessGroup,
    agreement: Agreement,
) -> None:
    """Compare maps and kinds of tensors across ranks before anything moves; raise on all ranks or on none.

    refusal     why this rank cannot start
    agreement   of the expert-parallel ranks; if `group` has no other ranks, they compare on hosts, in its group
    """
    maps = hashlib.sha256(repr((list(layers), wanted_LE.shape, wanted_LE.tolist())).encode())
    maps.update(repr([layer.physical_to_logical_E.tolist() for layer in layers.values()]).encode())
    kinds = [[(s.name, s.rows.dtype, s.rows.shape[1:]) for s in of_layer] for of_layer in tensors.values()]
    has_rows = any(len(s.rows) for of_layer in tensors.values() for s in of_layer)  # else it may lack states
    payload = bytes([refusal is not None, has_rows]) + maps.digest() + hashlib.sha256(repr(kinds).encode()).digest()
    own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if group.size() == agreement.num_ranks:
        group = agreement.group
    else:
        own = own.to(next(iter(layers.values())).ep_mesh.device_type)
    place = Place(dist.get_rank(group), -1, -1)
    gathered = all_gather(own, group, "the agreement on a map of homes (nothing has moved)", place)
    payload_R = [bytes(other.tolist()) for other in gathered]
    if refusal is not None:
        raise refusal
    members = dist.get_process_group_ranks(group)
    refusing = [rank for rank, other in zip(members, payload_R, strict=True) if other[0]]
    if refusing:
        raise EngineError(f"ranks {refusing} refuse to move experts, so nothing has moved: see their messages")
    everywhere = list(range(len(members)))
    for what, part, compared in (
        ("another map of homes (old or new)", slice(2, 34), everywhere),
        ("other gradients or optimizer states", slice(34, None), [n for n in everywhere if payload_R[n][1]]),
    ):
        differing = [members[n] for n in compared if payload_R[n][part] != payload_R[compared[0]][part]]
        if differing:
            raise EngineError(
                f"ranks {differing} have {what} than rank {members[compared[0]]}, so nothing has moved: make the plan "
                "on one rank and send it to the others, and move experts at the same point of a step everywhere"
            )
