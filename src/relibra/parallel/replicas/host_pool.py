"""`HostPool`: all expert weights of a model once per machine in shared memory; any rank reads any expert.

Blocks `[E, ...]`, one per layer and parameter, in logical expert order and in the dtype of the parameters. A refresh
updates them: ranks write their homes, then the first ranks of machines exchange experts that other machines lack.
"""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Int, Int64
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP, balanced_layers
from relibra.parallel.homes.home_shards import HomeShard, home_shards
from relibra.parallel.replicas.shared_memory import gather_integers, reserve

_ALIGNMENT = 64
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Block(NamedTuple):
    """Location of the experts of one parameter of one layer: E rows of `row_bytes` from `offset` on."""

    offset: int
    row_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class HostPool:
    """Weights as of the last `refresh`; every rank of the default process group has to make one.

    num_bytes   size of the pool of one machine
    machine_R   machine of each rank, numbered by their first ranks
    """

    def __init__(self, model: nn.Module, *, ranks_per_machine: int | None = None) -> None:
        """Reserve the memory; collective. The pool has no weights before the first `refresh`.

        model               loaded with `ep_implementation="relibra"`
        ranks_per_machine   this many consecutive ranks share a pool; None: those on hosts of the same name
        raises              EngineError when a machine has too little shared memory, on every rank
        """
        self._layers = list(balanced_layers(model).values())
        self._blocks, self.num_bytes = _blocks(self._layers)
        everyone = self._host_group(range(dist.get_world_size()))
        assert everyone is not None, "all ranks are members"
        self._everyone = everyone
        self.machine_R = self._machines(ranks_per_machine)
        self._firsts: list[int] = np.unique(self.machine_R, return_index=True)[1].tolist()
        self._between = self._host_group(self._firsts)
        memory = reserve(self.num_bytes, self.machine_R, self._everyone)
        self._bytes: Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._refreshed: tuple[Tensor, list[ndarray]] | None = None

    def refresh(self) -> None:
        """Write the weights of all homes into the pools of all machines; collective. No rank may be prefetching.

        raises   EngineError when the ranks disagree on the homes of experts
        """
        memory = self._memory()
        shards = [home_shards(layer) for layer in self._layers]
        maps = [layer.physical_to_logical_E.copy() for layer in self._layers]
        held_LE = _held(shards, maps)
        held_RLE = gather_integers(held_LE.ravel().tolist(), self._everyone).reshape(-1, *held_LE.shape)
        writes_RLE, source_LE = assign_writers(
            held_RLE, self.machine_R
        )  # the all-gather is a barrier: no rank reads any more
        self._refreshed = None  # until the refresh is complete
        own_LE = writes_RLE[dist.get_rank()]
        for blocks, of_layer, map_E, own_E in zip(self._blocks, shards, maps, own_LE, strict=True):
            for shard in of_layer:
                pool_E = _rows(memory, blocks[shard.name])
                for expert, row in zip(map_E[shard.first :].tolist(), shard.rows, strict=False):
                    if own_E[expert]:
                        pool_E[expert].copy_(row)
        fingerprint = _fingerprint(shards)
        dist.barrier(self._everyone)
        self._exchange(memory, source_LE)
        dist.barrier(self._everyone)
        self._refreshed = (fingerprint, maps)

    def keep_current(self) -> None:
        """Refresh if the homes of any rank have changed; collective. No rank may be prefetching."""
        if gather_integers([int(self.is_current())], self._everyone).min() == 0:
            self.refresh()

    def is_current(self) -> bool:
        """Return whether weights and positions of this rank's homes are those of the last refresh; local.

        Weights are compared by a checksum over their bits, which reads all rows of this rank once on their device:
        version counters of tensors miss multi-tensor and fused optimizers on sharded parameters.
        """
        self._memory()
        if self._refreshed is None:
            return False
        fingerprint, maps = self._refreshed
        if not all((layer.physical_to_logical_E == old).all() for layer, old in zip(self._layers, maps, strict=True)):
            return False
        return torch.equal(_fingerprint([home_shards(layer) for layer in self._layers]), fingerprint)

    def weights(self, layer_position: int, expert: int) -> dict[str, Tensor]:
        """Return the weights of one expert by name of the parameter, as views that torch refuses to write to.

        layer_position   of the layer among those with experts, from 0
        expert           logical
        raises           EngineError before the first refresh, after `close`, or when there is no such expert
        """
        memory = self._memory()
        if self._refreshed is None:
            raise EngineError("the host pool has no weights yet: call refresh() on every rank first")
        experts = next(iter(self._blocks[0].values())).shape[0]
        if not (0 <= layer_position < len(self._blocks) and 0 <= expert < experts):
            raise EngineError(
                f"the host pool has no expert {expert} in layer position {layer_position}: it holds experts 0 to "
                f"{experts - 1} of layer positions 0 to {len(self._blocks) - 1}"
            )
        blocks = self._blocks[layer_position]
        return {name: _read_only(_rows(memory, block)[expert]) for name, block in blocks.items()}

    def copy_to(self, layer_position: int, expert: int, out: Mapping[str, Tensor]) -> None:
        """Copy the weights of one expert into tensors of the same names and shapes, on any device, cast to their dtype.

        raises   EngineError as `weights` does, or when `out` does not fit
        """
        weights = self.weights(layer_position, expert)
        expected = {name: tuple(weight.shape) for name, weight in weights.items()}
        given = {name: tuple(tensor.shape) for name, tensor in out.items()}
        if given != expected:
            raise EngineError(
                f"layer position {layer_position}, expert {expert}: the weights have shapes {expected}, and the "
                f"tensors to copy them into {given}: pass one of the same shape for each name"
            )
        with torch.no_grad():
            for name, weight in weights.items():
                out[name].copy_(weight)

    def close(self) -> None:
        """Release the memory once no view of this rank is left; local. Closing again has no effect."""
        self._bytes = None

    def __enter__(self) -> HostPool:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def _memory(self) -> Tensor:
        if self._bytes is None:
            raise EngineError("the host pool is closed: make a new one on every rank")
        return self._bytes

    def _machines(self, ranks_per_machine: int | None) -> Int64[ndarray, " R"]:
        """Return the machine of each rank, numbered in the order of their first ranks."""
        num_ranks = dist.get_world_size()
        if ranks_per_machine is not None:
            if ranks_per_machine < 1 or num_ranks % ranks_per_machine:
                raise EngineError(
                    f"{num_ranks} ranks do not make machines of {ranks_per_machine}: ranks_per_machine has to divide "
                    "the number of ranks"
                )
            return np.arange(num_ranks) // ranks_per_machine
        name = hashlib.sha256(socket.gethostname().encode()).digest()[:8]
        name_R = gather_integers([int.from_bytes(name, "little", signed=True)], self._everyone)[:, 0]
        _, first_R, machine_R = np.unique(name_R, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first_R))[machine_R].astype(np.int64)

    def _exchange(self, memory: Tensor, source_LE: Int64[ndarray, "L E"]) -> None:
        """Broadcast experts from their source to the first ranks of the other machines, from pool to pool."""
        if self._between is None or (source_LE < 0).all():
            return
        for machine, first in enumerate(self._firsts):
            for blocks, source_E in zip(self._blocks, source_LE, strict=True):
                for start, stop in _consecutive_runs(np.flatnonzero(source_E == machine)):
                    for offset, row_bytes, _, _ in blocks.values():
                        piece = memory[offset + start * row_bytes : offset + stop * row_bytes]
                        dist.broadcast(piece, first, group=self._between)

    def _host_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return a gloo group of these ranks, None on other ranks; collective over all ranks."""
        like = self._layers[0].ep_mesh
        timeout = like.get_group()._get_backend(torch.device(like.device_type)).options._timeout
        group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        return group if dist.get_rank() in ranks else None


def assign_writers(
    held_RLE: Int[ndarray, "R L E"], machine_R: Int[ndarray, " R"]
) -> tuple[Bool[ndarray, "R L E"], Int64[ndarray, "L E"]]:
    """Return which rank writes which expert into the pool of its machine, and which machine sends it to the others.

    The first rank of a machine that stores an expert writes it; the machine of the first rank of all sends it, -1 if
    every machine has it.

    held_RLE   1 if the rank stores the expert; data-parallel replicas store each more than once
    raises     EngineError when experts are not all stored equally often
    """
    copies_LE = held_RLE.sum(axis=0)
    wrong_LE = (copies_LE != copies_LE.sum() // copies_LE.size) | (copies_LE == 0)
    if wrong_LE.any():
        layer, expert = np.argwhere(wrong_LE)[0].tolist()
        raise EngineError(
            f"layer position {layer}: expert {expert} is at home on ranks "
            f"{np.flatnonzero(held_RLE[:, layer, expert]).tolist()}, others more or less often, so the ranks disagree "
            "on the homes: move experts on all ranks alike, then refresh"
        )
    writes_RLE = np.zeros(held_RLE.shape, dtype=bool)
    everywhere_LE = np.ones(copies_LE.shape, dtype=bool)
    for machine in range(int(machine_R.max()) + 1):
        ranks = np.flatnonzero(machine_R == machine)
        before_RLE = held_RLE[ranks].cumsum(axis=0)
        writes_RLE[ranks] = (held_RLE[ranks] > 0) & (before_RLE == 1)
        everywhere_LE &= before_RLE[-1] > 0
    return writes_RLE, np.where(everywhere_LE, -1, machine_R[held_RLE.argmax(axis=0)])


def _blocks(layers: Sequence[BalancedEP]) -> tuple[list[dict[str, _Block]], int]:
    """Return the blocks of all layers, one after another, and their bytes together."""
    blocks, end = [], 0
    for layer in layers:
        of_layer = {}
        for shard in home_shards(layer):
            shape, dtype = tuple(shard.parameter.shape), shard.parameter.dtype
            offset = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
            of_layer[shard.name] = block = _Block(offset, math.prod(shape[1:]) * dtype.itemsize, shape, dtype)
            end = offset + shape[0] * block.row_bytes
        blocks.append(of_layer)
    return blocks, end


def _rows(memory: Tensor, block: _Block) -> Tensor:
    """Return all experts of a block `[E, ...]`."""
    end = block.offset + block.shape[0] * block.row_bytes
    return memory[block.offset : end].view(block.dtype).view(block.shape)


def _read_only(tensor: Tensor) -> Tensor:
    """Return the same memory as an inference tensor: torch refuses to write to one outside of inference mode."""
    with torch.inference_mode():
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _held(shards: Sequence[Sequence[HomeShard]], maps: Sequence[Int64[ndarray, " E"]]) -> Int64[ndarray, "L E"]:
    """Return 1 for each expert whose rows are on this rank."""
    held_LE = np.zeros((len(maps), len(maps[0])), dtype=np.int64)
    for layer, (of_layer, map_E) in enumerate(zip(shards, maps, strict=True)):
        places = {(shard.first, len(shard.rows)) for shard in of_layer}
        assert len(places) == 1, f"all parameters of a layer are sharded alike, got (first, rows) {places}"
        first, num_rows = places.pop()
        held_LE[layer, map_E[first : first + num_rows]] = 1
    return held_LE


def _fingerprint(shards: Sequence[Sequence[HomeShard]]) -> Tensor:
    """Return one number per row: its bits as integers, times odd numbers, summed modulo 2^64.

    A change of one integer always changes it, and so does a swap of two.
    """
    sums = []
    for shard in (shard for of_layer in shards for shard in of_layer):
        rows_YX = _integers(shard.rows.flatten(1))
        weights_X = (2 * torch.arange(rows_YX.shape[1], device=rows_YX.device) + 1) * 0x9E3779B97F4A7C1
        sums += [(row_X * weights_X).sum() for row_X in rows_YX]  # row by row, for memory of the size of one
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def _integers(rows_YX: Tensor) -> Tensor:
    """Return the bits of rows as integers, of eight bytes each if the bytes of a row are a multiple of eight."""
    row_bytes = rows_YX.shape[1] * rows_YX.dtype.itemsize
    return rows_YX.view(_OF_SIZE[8 if row_bytes % 8 == 0 else rows_YX.dtype.itemsize])


def _consecutive_runs(ids_X: Int[ndarray, " X"]) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, stop) of consecutive numbers in ascending ones."""
    for run in np.split(ids_X, np.flatnonzero(np.diff(ids_X) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1
