"""`ScheduleLimits`: how many tokens, and how much attention, a schedule may give to a rank in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from relibra.routing.demand import ScheduledDemand

_SLACK = 0.02
"""Share by which a packed micro-batch may exceed the largest one of the given schedule."""


@dataclass(frozen=True, kw_only=True)
class ScheduleLimits:
    """Limits of a (micro-batch, rank) and of a micro-batch; a sample above those of a rank is alone there.

    rank_tokens          tokens
    rank_attention       attention cost: sum of squared lengths
    micro_batch_tokens   tokens over all ranks
    """

    rank_tokens: int
    rank_attention: int
    micro_batch_tokens: float

    @classmethod
    def of_demand(cls, demand: ScheduledDemand, *, rank_tokens: int | None) -> ScheduleLimits:
        """Return the limits of a given schedule; tokens are those of `Demand.length_S`.

        rank_tokens   None: of the fullest rank of the given schedule. The limit of attention is the most of any rank
                      within `rank_tokens`
        """
        tokens_MR = demand.sum_per_rank(demand.length_S)
        attention_MR = demand.sum_per_rank(demand.attention_S)
        most = int(tokens_MR.max(initial=0)) if rank_tokens is None else rank_tokens
        return cls(
            rank_tokens=most,
            rank_attention=int(attention_MR[tokens_MR <= most].max(initial=0)),
            micro_batch_tokens=float(tokens_MR.sum(axis=1).max(initial=0)) * (1 + _SLACK),
        )
