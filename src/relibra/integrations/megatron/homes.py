"""`relocate`: move experts of a Megatron model to other homes, with their optimizer states; between two steps.

The tensors of an expert travel together, as bytes, and are copied into the tensors at its new position, so optimizers
and gradient buffers keep their tensors. What each rank sends and receives follows from the old and the new map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.integrations.megatron.execution import planned_layers, states_of_ranks
from relibra.integrations.megatron.moe_layer import PlannedMoELayer


@dataclass(frozen=True, eq=False)
class StateTensors:
    """Tensors of one parameter that travel with its expert, by name.

    tensors   of this rank: the parameter and its optimizer states, or this rank's part of them
    part      (start, end) of that part; experts change places only between equal parts
    write     writes tensors of these names in place
    """

    tensors: dict[str, Tensor]
    part: tuple[int, int]
    write: Callable[[dict[str, Tensor]], None]


def relocate(chunks: Sequence[nn.Module], physical_to_logical_map: Int[ndarray, "L E"], optimizer: Any = None) -> int:
    """Move experts to the positions of a map; collective over the expert-parallel group.

    Returns the number of experts that changed their position, over all layers of this rank's stage.

    physical_to_logical_map   logical expert at each position, one row per planned layer of the model on this rank
    optimizer                 a torch optimizer, or Megatron's; None: there is none yet
    raises                    EngineError, before anything moves: a map is no permutation or differs between ranks; a
                              layer waits for its recomputation; optimizer states cannot be moved
    """
    layers, wanted_LE = planned_layers(chunks), np.asarray(physical_to_logical_map)
    kinds: dict[int, str] = {}
    refusal: EngineError | None = None
    try:
        _check_map(layers, wanted_LE)
        kinds = {
            layer_id: _kind_of_states(layer, optimizer)
            for (layer_id, layer), wanted_E in zip(layers.items(), wanted_LE, strict=True)
            if (wanted_E != layer.physical_to_logical_E).any()
        }
    except EngineError as error:
        refusal = error  # raised after the exchange of agreement, so that no rank waits for this one
    _check_agreement(layers, wanted_LE, kinds, refusal)
    moved = 0
    for (layer_id, layer), wanted_E in zip(layers.items(), wanted_LE, strict=True):
        if layer_id in kinds:
            moved += int((wanted_E != layer.physical_to_logical_E).sum())
            _relocate_layer(layer, wanted_E.astype(np.int64), optimizer)
    return moved


@contextmanager
def logical_order(chunks: Sequence[nn.Module], optimizer: Any = None) -> Iterator[None]:
    """Move experts into the order 0..E-1 within the block, and back after it: to save, load or export; collective.

    with logical_order([model], optimizer):
        save_checkpoint(...)
    """
    homes_LE = np.stack([layer.physical_to_logical_E for layer in planned_layers(chunks).values()])
    relocate(chunks, np.broadcast_to(np.arange(homes_LE.shape[1]), homes_LE.shape), optimizer)
    try:
        yield
    finally:
        relocate(chunks, homes_LE, optimizer)


def _relocate_layer(layer: PlannedMoELayer, wanted_E: ndarray, optimizer: Any) -> None:
    """Move the experts of one layer and set its map."""
    group, n = layer.ep_group, layer.num_local_experts
    own = dist.get_rank(group)
    states = _states(layer, optimizer)
    old_E = layer.physical_to_logical_E
    position_E = np.argsort(old_E)
    targets = np.flatnonzero(old_E != wanted_E)
    sources = position_E[wanted_E[targets]]
    leaving = [_pack(states[source % n]) for source in sources[sources // n == own]]  # in the order of targets
    sent_R: list[list[Tensor]] = [[] for _ in range(dist.get_world_size(group))]
    for tensor, target in zip(leaving, targets[sources // n == own].tolist(), strict=True):
        sent_R[target // n].append(tensor)
    arrives = targets // n == own
    coming, sender = targets[arrives], sources[arrives] // n
    from_R = np.bincount(sender, minlength=len(sent_R))
    device = next(layer.parameters()).device
    width = sum(t.nbytes for state in states[0] for t in state.tensors.values())
    received = torch.empty((len(coming), width), dtype=torch.uint8, device=device)
    sent = torch.stack([t for item in sent_R for t in item]) if leaving else received.new_empty((0, width))
    dist.all_to_all_single(received, sent, from_R.tolist(), [len(item) for item in sent_R], group=group)
    arrived = torch.zeros(1, device=device)
    dist.all_reduce(arrived, group=group)  # nothing is written before all rows have arrived everywhere
    for row, target in zip(received, coming[np.argsort(sender, kind="stable")].tolist(), strict=True):
        _unpack(row, states[target % n])
    layer.physical_to_logical_E = wanted_E.copy()


def _pack(states: Sequence[StateTensors]) -> Tensor:
    """Return all tensors of an expert as bytes."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for state in states for t in state.tensors.values()]
    return torch.cat(flat)


def _unpack(row: Tensor, states: Sequence[StateTensors]) -> None:
    """Write the bytes of an expert into the tensors of a slot."""
    start = 0
    for state in states:
        values = {}
        for name, tensor in state.tensors.items():
            own = row[start : start + tensor.nbytes].clone()
            values[name] = own.view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        state.write(values)


def _states(layer: PlannedMoELayer, optimizer: Any) -> list[list[StateTensors]]:
    """Return what travels with each local expert."""
    return [
        [state_tensors(p.tensor, f"layer {layer.layer_id}, {p.name}", optimizer) for p in layer.expert_parameters(slot)]
        for slot in range(layer.num_local_experts)
    ]


def _check_map(layers: dict[int, PlannedMoELayer], wanted_LE: ndarray) -> None:
    """Raise EngineError for a map of other sizes or no permutation, and for layers that cannot move now."""
    experts = next(iter(layers.values())).config.num_moe_experts
    if wanted_LE.shape != (len(layers), experts):
        raise EngineError(
            f"the map of homes has shape {wanted_LE.shape}, and this rank {len(layers)} layers of {experts} experts: "
            f"decoder layers {list(layers)}; with pipeline stages pass their rows of the map"
        )
    for (layer_id, layer), wanted_E in zip(layers.items(), wanted_LE, strict=True):
        if not np.array_equal(np.sort(wanted_E), np.arange(experts)):
            raise EngineError(f"layer {layer_id}: the map of homes {wanted_E.tolist()} is no permutation")
        if layer.passes.num_awaiting:
            raise EngineError(f"layer {layer_id} waits for its backward pass: move experts between steps")


def _kind_of_states(layer: PlannedMoELayer, optimizer: Any) -> str:
    """Return the names and parts of the tensors of a local expert; raise EngineError where experts differ."""
    kinds = {repr([(list(s.tensors), s.part) for s in slot]) for slot in _states(layer, optimizer)}
    if len(kinds) > 1:
        raise _other_states(f"layer {layer.layer_id}")
    return kinds.pop()


def _other_states(where: str) -> EngineError:
    return EngineError(
        f"{where}: optimizer states of experts are cut at other places in each slot, or absent in some, so experts "
        "cannot change places: use one expert-data-parallel rank, or do not move homes"
    )


def _check_agreement(
    layers: dict[int, PlannedMoELayer], wanted_LE: ndarray, kinds: dict[int, str], refusal: EngineError | None
) -> None:
    """Raise EngineError where a rank refuses, or ranks have other maps or states; collective."""
    first = next(iter(layers.values()))
    maps = repr([wanted_LE.tolist(), [layer.physical_to_logical_E.tolist() for layer in layers.values()]])
    state = b"".join(hashlib.sha256(s.encode()).digest() for s in (maps, repr(kinds)))
    states_R = states_of_ranks(first, refusal, state, "no expert has moved")
    if len({item[:32] for item in states_R}) > 1:
        raise EngineError(
            "no expert has moved: ranks of an expert-parallel group have different maps of homes: make the plan on one "
            "rank, and send it"
        )
    if len(set(states_R)) > 1:
        raise _other_states("some expert-parallel ranks")


def state_tensors(parameter: nn.Parameter, where: str, optimizer: Any) -> StateTensors:
    """Return the tensors of a parameter that travel with its expert.

    Known optimizers: torch's; of Megatron-core 0.19, `Float16OptimizerWithFloat16Params`, `FP32Optimizer`,
    `DistributedOptimizer`, and `ChainedOptimizer` of these.

    raises   EngineError for a parameter that the optimizer does not have
    """
    if optimizer is None:
        return _whole(parameter, {})
    for item in getattr(optimizer, "chained_optimizers", [optimizer]):
        if parameter in getattr(item, "model_param_group_index_map", {}):
            return _distributed(parameter, item)
        inner = getattr(item, "optimizer", item)
        main = getattr(parameter, "main_param", None)
        trained = parameter if main is None else main
        if any(trained is p for group in getattr(inner, "param_groups", ()) for p in group["params"]):
            states = {} if main is None else {"main": main.data}
            own = inner.state.get(trained, {}).items()
            return _whole(parameter, states | {k: v for k, v in own if torch.is_tensor(v) and v.shape == trained.shape})
    raise EngineError(f"{where} is not among the parameters of {type(optimizer).__name__}: pass the one that trains it")


def _whole(parameter: nn.Parameter, states: dict[str, Tensor]) -> StateTensors:
    """Return the parameter and its states, which this rank has whole."""
    tensors = {"parameter": parameter.data, **states}

    def write(values: dict[str, Tensor]) -> None:
        for name, tensor in values.items():
            tensors[name].copy_(tensor)

    return StateTensors(tensors, (0, parameter.numel()), write)


def _distributed(parameter: nn.Parameter, optimizer: Any) -> StateTensors:
    """Return the parameter, and this rank's part of its states in Megatron's distributed optimizer."""
    part = optimizer._get_model_param_range_map(parameter)["param"]
    states = optimizer._get_main_param_and_optimizer_states(parameter)

    def write(values: dict[str, Tensor]) -> None:
        parameter.data.copy_(values.pop("parameter"))
        optimizer._set_main_param_and_optimizer_states(parameter, values)

    return StateTensors({"parameter": parameter.data, **states}, (part.start, part.end), write)
