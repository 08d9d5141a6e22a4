"""Bytes and seconds of the copies between device and host memory that `update.offload` asks for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from relibra.cluster import Cluster
from relibra.rl.config.settings import UpdateSettings

MOMENT_BYTES, WEIGHT_BYTES = 8, 4
"""Of a trained weight: two moments; itself."""


@dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """Bytes of a rank that an RL step copies.

    both_ways   moments, in each direction at the same time
    inward      weights to the device, while nothing is computed
    outward     weights to the host, while nothing is computed
    """

    both_ways: float = 0.0
    inward: float = 0.0
    outward: float = 0.0

    def seconds(self, cluster: Cluster) -> float:
        """Return the seconds that a rank of this machine takes."""
        return float(sum(cluster.host.seconds(part) for part in (self.both_ways, self.inward, self.outward)))


def host_traffic(
    update: UpdateSettings,
    *,
    trained: float,
    optimizer_steps: int,
    idle_trained: float = 0.0,
    frozen_bytes: float = 0.0,
) -> HostTraffic:
    """Return what a rank copies in an RL step.

    trained           weights of the policy that this rank holds, and trains
    optimizer_steps   of each trained model: mini-batches x epochs
    idle_trained      weights of the value model that it holds
    frozen_bytes      of the reference policy that it holds, which changes nothing: only inward
    """
    if update.offload == "off":
        return HostTraffic()
    # The value model comes to the device for its values and for its update, the policy when the server has sampled.
    moved = WEIGHT_BYTES * (2 * idle_trained + (trained if update.offload == "all" else 0.0))
    moments = MOMENT_BYTES * optimizer_steps * (trained + idle_trained)
    return HostTraffic(both_ways=moments, inward=moved + frozen_bytes, outward=moved)
