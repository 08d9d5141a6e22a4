"""`ParallelLayout`: division of the ranks of a training job into expert-parallel groups, stages and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relibra.cluster import MAX_RANKS, Cluster
from relibra.errors import ConfigError
from relibra.simulation.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """R ranks share the experts of a layer; stages share the layers; groups hold the same experts (EDP).

    Rank numbers of the whole job: (stage x data_parallel + group) x R + rank of the expert-parallel group. Each group
    and stage is on nodes of its own; a cluster describes the nodes of one group.

    expert_parallel   R, ranks of one expert-parallel group; attention runs data-parallel on the same ranks
    pipeline_stages   consecutive parts of the layers, each on ranks of its own, run one forward one backward (1F1B)
    data_parallel     expert-parallel groups of a stage; each runs its own micro-batches, gradients are summed
    stage_sizes       expert layers of each stage; (): as even as whole layers allow
    raises            ConfigError for numbers below 1 or too many ranks
    """

    expert_parallel: int
    pipeline_stages: int = 1
    data_parallel: int = 1
    stage_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("expert_parallel", "pipeline_stages", "data_parallel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"layout has {name} {value!r}: it must be a whole number of at least 1")
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(f"layout {self} has {self.num_ranks} ranks: at most {MAX_RANKS}")

    def __str__(self) -> str:
        return f"EP {self.expert_parallel} x PP {self.pipeline_stages} x DP {self.data_parallel}"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.expert_parallel * self.pipeline_stages * self.data_parallel

    def place(self, rank: int) -> tuple[int, int]:
        """Return pipeline stage and expert-parallel group of a rank of the job."""
        return divmod(rank // self.expert_parallel, self.data_parallel)

    def rank_in_group(self, rank: int) -> int:
        """Return the number of a rank of the job in its expert-parallel group."""
        return rank % self.expert_parallel

    def check(self, cluster: Cluster, model: ModelShape) -> None:
        """Raise ConfigError for a layout that does not fit the cluster and the model.

        cluster   of one expert-parallel group
        """
        R, stages = self.expert_parallel, self.pipeline_stages
        if cluster.num_ranks != R:
            raise ConfigError(
                f"layout {self} has expert-parallel groups of {R} ranks, cluster {cluster.name!r} has "
                f"{cluster.num_ranks}: pass the part that one group runs on, cluster.with_ranks({R})"
            )
        if model.experts % R:
            raise ConfigError(
                f"layout {self}: {model.experts} experts of {model.name!r} do not spread evenly over {R} ranks: choose "
                f"expert_parallel among the divisors of {model.experts}"
            )
        if stages > model.moe_layers:
            raise ConfigError(
                f"layout {self}: {model.moe_layers} expert layers of {model.name!r} do not fill {stages} pipeline "
                f"stages: choose at most {model.moe_layers}"
            )

    def stage_layers(self, num_layers: int) -> list[slice]:
        """Return the expert layers of each stage; where sizes are even, the first stages take the remainder.

        raises   ConfigError when `stage_sizes` do not cut the layers into stages

        >>> ParallelLayout(expert_parallel=8, pipeline_stages=3).stage_layers(8)
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
        """
        sizes = self.stage_sizes or even_sizes(num_layers, self.pipeline_stages)
        if self.stage_sizes and (len(sizes), sum(sizes), min(sizes) > 0) != (self.pipeline_stages, num_layers, True):
            raise ConfigError(
                f"layout {self} has stages of {sizes} expert layers: give {self.pipeline_stages} sizes of at least 1 "
                f"that add up to {num_layers}"
            )
        return layer_slices(sizes)


def even_sizes(num_layers: int, parts: int) -> tuple[int, ...]:
    """Return sizes of parts that differ by at most one layer, the larger ones first."""
    return tuple(len(part) for part in np.array_split(np.arange(num_layers), parts))


def layer_slices(sizes: Sequence[int]) -> list[slice]:
    """Return the layers of consecutive parts."""
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
