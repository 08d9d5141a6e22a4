"""What the peers of a dry run would send, and what its device would say: replaces functions that need them.

The names that are replaced are private ones of relibra and transformers; `tests/rl/memory` fails where one has moved.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import AllToAllEP

import relibra.parallel.balanced as balanced
import relibra.parallel.group_state as group_state
import relibra.parallel.homes.home_shards as home_shards
import relibra.parallel.preparation as preparation
import relibra.parallel.rows.prepared_rows as prepared_rows
import relibra.rl.model.host_adamw as host_adamw
import relibra.rl.model.host_memory as host_memory
import relibra.rl.model.host_weights as host_weights
import relibra.rl.model.token_scores as token_scores
from relibra.planning.traffic.rank_tables import micro_batch_tables
from relibra.replay import BatchRoutes
from relibra.rl.memory.fake_device import DEVICE, install, replace_in
from relibra.rl.update import policy_update, value_update


class StandIns:
    """Peers of rank 0, and its device.

    device   of this process
    routes   of each micro-batch and rank, for the lists of rows that the others send
    mode     `FakeDeviceMode` of the dry run, which counts page-locked memory
    """

    def __init__(self, num_ranks: int) -> None:
        """Make the device and replace the functions, once per process."""
        self.device = install(num_ranks)
        self.routes: dict[tuple[int, int], BatchRoutes] = {}
        self.mode: Any = None
        self._num_ranks, self._rows, self._step = num_ranks, 0, SimpleNamespace()
        move: Any = PreTrainedModel.to
        replace_in(
            PreTrainedModel,
            initialize_weights=lambda _: None,  # random DTensors need states of a generator
            to=lambda model, *args, **options: model if _is_on_device(model) else move(model, *args, **options),
        )
        self._join_groups()
        self._prepare_rows()
        self._share_rows_evenly()
        self._take_fake_rows()
        self._lock_host_memory()

    def guess(self, tensor: Tensor) -> Any:
        """Return the values of a tensor of rows sent to and received from each rank; None: its shape is another.

        Where routes are replayed, by those of the first layer, which all layers have; else equal over ranks.
        """
        ranks = self._num_ranks
        if tuple(tensor.shape) != (2, ranks):
            return None
        if self.routes and self.mode.phase in ("recompute", "update"):
            routes_R, experts = [self.routes[0, r] for r in range(ranks)], self.routes[0, 0].num_experts // ranks
            home_RX = (one.experts_TLK[:, 0].numpy().ravel() // experts for one in routes_R)
            sent_RR = np.stack([np.bincount(home_X, minlength=ranks) for home_X in home_RX])
            return [sent_RR[0].tolist(), sent_RR[:, 0].tolist()]
        return [[self._rows // ranks + (r < self._rows % ranks) for r in range(ranks)]] * 2

    def reduce_gradients(self, *, each_micro_batch: bool) -> None:
        """Say when gradients are reduced, which the size of the whole model decides."""
        for module in (policy_update, value_update):
            replace_in(module, each_micro_batch=lambda _model: each_micro_batch)

    def _join_groups(self) -> None:
        def same_ranks(group: Any, *_: object, **__: object) -> Any:
            return dist.new_group(dist.get_process_group_ranks(group))

        for module in (balanced, group_state):
            replace_in(module, make_same_ranks_group=same_ranks)

    def _prepare_rows(self) -> None:
        """Let the preparing thread say what it would page-lock on a GPU, and which step it prepares."""
        of_step, prepare = preparation.Preparation.of_step, prepared_rows.prepare_rows

        def noting_step(one: Any, step: Any) -> Any:
            self._step = step
            return of_step(one, step)

        def prepare_pageable(*args: Any, pinned: bool = False, **options: Any) -> Any:
            rows = prepare(*args, pinned=False, **options)
            for tensor in (rows.numbers, *(rows.kinds or ())) if pinned else ():
                self.mode.pin(tensor)
            return rows

        replace_in(preparation.Preparation, of_step=noting_step)
        replace_in(preparation, prepare_rows=prepare_pageable)
        replace_in(prepared_rows, _exchange=self._exchange)

    def _exchange(self, tables_L: Any, tables: Any, own: Any, _group: Any) -> tuple[ndarray, ndarray]:
        """Return what all ranks would send to this one; rows of peers are ordered here, from their routes."""
        place, pieces, heads, step = tables_L[0].place, list[ndarray](), list[ndarray](), self._step
        head = 3 + len(tables_L)
        for rank in range(self._num_ranks):
            stacked, rows = tables, own
            if rank != place.rank:
                peer_L = micro_batch_tables(step.plan, step.demand, rank, place.micro_batch, step.chunk)
                names = ("tokens_E", "send_RP", "first_RP", "receive_RP")
                stacked = prepared_rows._Stacked(*(np.stack([getattr(one, name) for one in peer_L]) for name in names))
                routes = self.routes.get((place.micro_batch, rank))
                kinds, room = prepared_rows.RowKinds.of(routes, pinned=False), int(stacked.send_LRP.sum())
                choice_X, token_Z = np.empty((2, room), np.int32)
                rows = prepared_rows._order_own(peer_L, stacked, routes, kinds, choice_X, token_Z)
            common = [rows.problem is not None, rows.live, rows.planned, *rows.send_LR[:, place.rank]]
            piece = np.array(common, dtype=np.int32)
            heads.append(piece)
            send_R = head + stacked.send_LRP.sum(axis=(0, 2))
            first = (np.cumsum(send_R) - send_R)[place.rank]
            pieces.append(np.concatenate([piece, rows.message_X[first + head : first + send_R[place.rank]]]))
        return np.concatenate(pieces), np.stack(heads)

    def _share_rows_evenly(self) -> None:
        call = AllToAllEP.__call__

        def noting_rows(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            self._rows = top_k_index.numel()
            return call(layer, hidden_states, top_k_index, top_k_weights)

        replace_in(AllToAllEP, __call__=noting_rows)

    def _lock_host_memory(self) -> None:
        def locked(num_bytes: int, device: torch.device) -> Tensor:
            memory: Tensor = self.mode.pin(host_memory.host_memory(num_bytes, device), rounds_up=False)
            return memory

        replace_in(host_adamw, host_memory=locked)
        replace_in(host_weights, host_memory=locked, _bytes_of=lambda storage: self.mode.bytes_of(storage))
        # Logits are the head's output, without factor or cap; copies have no stream of their own.
        replace_in(token_scores, _change_between=lambda _raw, _logits: token_scores.LogitChange())
        replace_in(host_memory.CopyStream, __init__=lambda stream, _device: setattr(stream, "_stream", None))

    def _take_fake_rows(self) -> None:
        parts = home_shards._parts

        def parts_of(value: object, rows: Tensor, what: str) -> Any:  # it asks for the very type Tensor
            local = home_shards._local(value) if isinstance(value, Tensor) else None
            is_whole = isinstance(local, FakeTensor) and local.shape == rows.shape
            return [("", local)] if is_whole else parts(value, rows, what)

        replace_in(home_shards, _parts=parts_of)


def _is_on_device(model: Any) -> bool:
    """Return whether there is nothing to move: `to` would swap fake tensors all the same, and fail."""
    return all(one.device.type == DEVICE for one in (*model.parameters(), *model.buffers()))
