"""`PlannedDispatcher`: Megatron's all-to-all dispatcher with sizes from a plan: no counts exchanged, no host sync.

Rows are permuted by logical expert, as Megatron does, and then brought into the order of the plan's slots; results
come back the same way. So every sum over the experts of a token is in the order of logical experts: its bits do not
depend on homes or replicas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from relibra.planning.traffic.rank_tables import RankTables


class PlannedDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """All-to-all dispatcher whose local experts are the slots of a plan: E / R homes, then replicas.

    tables   of the layer and micro-batch that runs now; set before each pass
    """

    tables: RankTables
    _num_slots: int = 0
    _order_X: Tensor | None = None
    _back_X: Tensor | None = None

    def preprocess(self, _routing_map: Tensor) -> Tensor:
        """Return the rows of each local slot, from the tables."""
        tables = self.tables
        self.num_out_tokens = int(tables.send_RP.sum())
        self.input_splits = tables.send_RP.sum(axis=1).tolist()
        self.output_splits = tables.receive_RP.sum(axis=1).tolist()
        self.output_splits_tp = None
        self._set_slots(tables.receive_RP.shape[1])
        self.num_global_tokens_per_local_expert = torch.from_numpy(tables.receive_RP).to(self.permute_idx_device)
        return torch.from_numpy(tables.receive_RP.sum(axis=0))

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and their weights in the order in which they are sent: by rank, slot, position."""
        rows_XH, weight_X = super().dispatch_preprocess(hidden_states, routing_map, probs)
        order_X = self.tables.send_order_X
        if np.array_equal(order_X, np.arange(len(order_X))):
            self._order_X = self._back_X = None
            return rows_XH, weight_X
        back_X = np.empty_like(order_X)
        back_X[order_X] = np.arange(len(order_X))  # the inverse, without a second sort
        self._order_X = torch.from_numpy(order_X).to(rows_XH.device, non_blocking=True)
        self._back_X = torch.from_numpy(back_X).to(rows_XH.device, non_blocking=True)
        return rows_XH[self._order_X], weight_X[self._order_X]

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum over the experts of each token, from rows in the order in which they were sent."""
        rows_XH = permutated_local_input_tokens
        return super().combine_postprocess(rows_XH if self._back_X is None else rows_XH[self._back_X])

    def _set_slots(self, num_slots: int) -> None:
        """Sort arrived rows by this many local slots."""
        if num_slots == self._num_slots:
            return
        chunk_RP = torch.arange(self.ep_size * num_slots, device=self.permute_idx_device)
        self.sort_input_by_local_experts = chunk_RP.reshape(-1, num_slots).T.ravel()
        self.restore_output_by_local_experts = chunk_RP.reshape(num_slots, -1).T.ravel()
        self.num_local_experts = self._num_slots = num_slots

    def _maybe_dtoh_and_synchronize(self, _point: str, tokens_per_expert: Any = None) -> Any:
        """Return the counts: all of them are on the host already."""
        return tokens_per_expert
