"""`RepackedStep`: another trainer's schedule, improved from recorded routes, and the line that says what changed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from jaxtyping import Float32, Int64
from numpy import ndarray

from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.repacking import TrainerSchedule, attention_skew, lowest_skew, rank_skew, repack


@dataclass(frozen=True, kw_only=True, eq=False)
class RepackedStep:
    """A schedule of all optimizer steps of one rollout.

    skew        load of the busiest expert-parallel rank / of the mean one, before and after
    lowest      bound of the skew of any schedule; what is above 1 is left to other homes, or replicas
    attention   attention of the data-parallel rank with most / of the mean one, before and after
    fullest     most tokens of a data-parallel rank in a micro-batch, before and after
    limit       tokens that a rank may have; None: not stated
    seconds     wall clock of planning
    """

    schedule: TrainerSchedule
    skew: tuple[float, float]
    lowest: float
    attention: tuple[float, float]
    fullest: tuple[int, int]
    limit: int | None
    seconds: float

    def line(self, what: str) -> str:
        """Return the line of the log, "relibra: update of 64 samples ...: expert rank skew 1.412 -> 1.220 ..."."""
        schedule = self.schedule
        limit = "" if self.limit is None else f" of {self.limit:,}"
        return (
            f"relibra: {what} of {len(schedule.rank_S):,} samples in {len(schedule.step_M)} micro-batches on "
            f"{schedule.num_ranks} data-parallel ranks: expert rank skew {self.skew[0]:.3f} -> {self.skew[1]:.3f} (no "
            f"schedule is below {self.lowest:.3f}), attention skew {self.attention[0]:.3f} -> {self.attention[1]:.3f}; "
            f"fullest rank {self.fullest[0]:,} -> {self.fullest[1]:,}{limit} tokens; planned in {self.seconds:.1f} s"
        )


def repack_step(
    share_SLR: Float32[ndarray, "S L R"],
    length_S: Int64[ndarray, " S"],
    given: TrainerSchedule,
    layout: ExpertLayout,
    *,
    rank_tokens: int | None,
    since: float,
    keep_ranks: bool = False,
    keep_counts: bool = False,
) -> RepackedStep:
    """Return the given schedule with samples exchanged until loads of expert-parallel ranks are even.

    Other arguments as in `repack`.

    since   `time.perf_counter()` when work on this step began
    """
    attention_S = layout.attention_prices(length_S)
    schedule = repack(
        share_SLR,
        length_S,
        given,
        rank_tokens=rank_tokens,
        attention_S=attention_S,
        keep_ranks=keep_ranks,
        keep_counts=keep_counts,
    )
    return RepackedStep(
        schedule=schedule,
        skew=(rank_skew(share_SLR, given), rank_skew(share_SLR, schedule)),
        lowest=lowest_skew(share_SLR, given),
        attention=(attention_skew(attention_S, given), attention_skew(attention_S, schedule)),
        fullest=(_fullest(given, length_S), _fullest(schedule, length_S)),
        limit=rank_tokens,
        seconds=time.perf_counter() - since,
    )


def _fullest(schedule: TrainerSchedule, length_S: Int64[ndarray, " S"]) -> int:
    return int(schedule.sum_per_rank(length_S).max(initial=0))
