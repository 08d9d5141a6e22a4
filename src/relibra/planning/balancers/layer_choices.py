"""`LayerChoices`: homes and replicas of every layer, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int32, Int64
from numpy import ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerChoices:
    """Homes and replicas of every layer, and what each micro-batch costs with them.

    cost_ML   without moves of homes: seconds, or with the token objective busiest rank / mean + `PUSH_PRICE` x pushes
    """

    home_LE: Int64[ndarray, "L E"]
    replica_MLRB: Int16[ndarray, "M L R B"]
    quota_MLRB: Int32[ndarray, "M L R B"]
    cost_ML: Float64[ndarray, "M L"]

    @property
    def cost_L(self) -> Float64[ndarray, " L"]:
        """Cost of each layer over the micro-batches."""
        return self.cost_ML.sum(axis=0)

    def of_layers(self, layers: Int64[ndarray, " l"], micro_batches: int | None = None) -> LayerChoices:
        """Return the choices of some layers, given as positions on the layer axis, and of the first micro-batches."""
        names = ("replica_MLRB", "quota_MLRB", "cost_ML")
        arrays = {name: getattr(self, name)[:micro_batches, layers] for name in names}
        return replace(self, home_LE=self.home_LE[layers], **arrays)

    def with_layers(self, other: LayerChoices, layers_L: Bool[ndarray, " L"]) -> LayerChoices:
        """Return these choices with those of another value in some layers."""
        home_LE = np.where(layers_L[:, None], other.home_LE, self.home_LE)
        return replace(self.with_replicas(other, np.broadcast_to(layers_L, self.cost_ML.shape)), home_LE=home_LE)

    def with_replicas(self, other: LayerChoices, chosen_ML: Bool[ndarray, "M L"]) -> LayerChoices:
        """Return these choices with the replicas of another value in some micro-batches and layers."""
        chosen_ML11 = chosen_ML[:, :, None, None]
        return replace(
            self,
            replica_MLRB=np.where(chosen_ML11, other.replica_MLRB, self.replica_MLRB),
            quota_MLRB=np.where(chosen_ML11, other.quota_MLRB, self.quota_MLRB),
            cost_ML=np.where(chosen_ML, other.cost_ML, self.cost_ML),
        )
