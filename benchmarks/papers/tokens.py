"""Tokens behind the loads of `papers.py`, so that rows between ranks are counted and not bounded.

Pairs of experts tell a lower bound of the rows that travel once per (token, rank), and how far it is off depends on the
plan. So single tokens are drawn for the counts of the generators, and recorded ones are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt8
from numpy import ndarray

from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows, distinct_rows_of_step
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Choices of single tokens, in the order of samples, and the sample of each."""

    experts_TLK: UInt8[ndarray, "T L K"]
    sample_T: Int64[ndarray, " T"]

    def rows(self, plan: StepPlan, demand: ScheduledDemand) -> DistinctRows:
        """Count the tokens that travel from rank to rank, and from rank to node, under a plan.

        demand   with the schedule of the plan
        """
        return distinct_rows_of_step(plan, demand, self.experts_TLK, self.sample_T)


def draw_tokens(demand: ScheduledDemand) -> Tokens:
    """Draw tokens with exactly the counts of each sample: as `with_pairs` has it, their choices know nothing of others.

    Systematic sampling in random order (Madow 1949): the token-slots of a sample's experts, in random order, are dealt
    to its tokens in turn, so no token picks an expert twice, and pairs are as many as with independent choices, on
    average over orders. Then tokens are shuffled.
    """
    rng = np.random.default_rng(0)
    S, L, E = demand.counts_SLE.shape
    K = demand.top_k or 1
    length_S = demand.counts_SLE[:, 0].sum(axis=1, dtype=np.int64) // K
    experts_TLK = np.empty((int(length_S.sum()), L, K), dtype=np.uint8)
    start_S = np.cumsum(length_S) - length_S
    for s in range(S):
        rows = slice(start_S[s], start_S[s] + length_S[s])
        for layer in range(L):
            order_E = rng.permutation(E)
            slots_X = np.repeat(order_E, demand.counts_SLE[s, layer, order_E])
            picked_KT = slots_X.reshape(K, int(length_S[s]))
            experts_TLK[rows, layer] = rng.permutation(picked_KT, axis=1).T
    return Tokens(experts_TLK=experts_TLK, sample_T=np.repeat(np.arange(S), length_S))


def repeated(experts_TLK: ndarray, sample_T: Int64[ndarray, " T"], times: int) -> Tokens:
    """Let each recorded token stand for several; those of no sample are left out."""
    kept_T = np.flatnonzero(sample_T >= 0)
    kept_T = np.repeat(kept_T[np.argsort(sample_T[kept_T], kind="stable")], times)
    return Tokens(experts_TLK=experts_TLK[kept_T].astype(np.uint8), sample_T=sample_T[kept_T])
