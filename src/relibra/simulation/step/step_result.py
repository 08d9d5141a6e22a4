"""`SimulatedStep`: seconds, bytes and waiting times of a simulated training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.planning.costs.step_bytes import StepBytes
from relibra.simulation.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """A step of all ranks (label `simulated`); ranks are numbered as in `ParallelLayout`.

    seconds            from the first micro-batch to the end of the optimizer, and the relocation before it
    terms              parts of `seconds`, which they add up to. Of the slowest expert-parallel group and its busiest
                       pipeline stage: attention (router, shared experts, dense layers and output matrix with it), host
                       (launches, host work, decisions of a live balancer), gathers (of weights outside of experts, not
                       hidden), exchange (rows), gates (their gate weights), compute (experts), copies (not hidden),
                       pipeline (waiting for other stages), gradients (their sum over ranks, not hidden), optimizer,
                       relocation
    stage_seconds      by stage of the timeline, of each rank: stages overlap, and dispatch and combine include waiting
                       for the last rank
    waited_R           seconds that each rank waited before exchanges until the last rank was there
    sent_bytes         by kind, of each rank: dispatch, combine, gates, gather, push, return, handover
    bytes              of all ranks by kind, inside nodes and between them
    token_slots_R      that each rank computed in a forward pass
    expert_skew, attention_skew   seconds of the busiest rank / of the mean rank, each summed over micro-batches and
                       layers; 1 without work
    copy_seconds       of copies between experts, hidden or not, in the slowest group and its busiest stage
    useful_flops       of all ranks: forward and backward once, or forward alone if that is the step; no recomputation
    peak_flops_per_second   of one rank
    notes              what the figures leave out, as sentences
    """

    layout: ParallelLayout
    seconds: float
    terms: Mapping[str, float]
    stage_seconds: Mapping[str, Float64[ndarray, " R"]]
    waited_R: Float64[ndarray, " R"]
    sent_bytes: Mapping[str, Float64[ndarray, " R"]]
    bytes: StepBytes
    token_slots_R: Int64[ndarray, " R"]
    expert_skew: float
    attention_skew: float
    copy_seconds: float
    useful_flops: float
    peak_flops_per_second: float
    notes: tuple[str, ...] = ()

    @property
    def seconds_without_relocation(self) -> float:
        """Return the seconds of a step whose experts are already at their homes."""
        return self.seconds - self.terms["relocation"]

    def with_relocation_over(self, steps: int) -> SimulatedStep:
        """Return the step with only its share of a relocation that serves `steps` steps."""
        part = self.terms["relocation"] / steps
        return replace(self, seconds=self.seconds_without_relocation + part, terms={**self.terms, "relocation": part})

    @property
    def utilisation(self) -> float:
        """Return the share of the seconds of all ranks in which they compute: attention and experts."""
        busy_R = self.stage_seconds["attention"] + self.stage_seconds["experts"]
        return float(busy_R.mean() / self.seconds) if self.seconds else 0.0

    @property
    def model_flops_utilisation(self) -> float:
        """Return the useful flops per second of all ranks / their peak (MFU)."""
        possible = self.seconds * self.layout.num_ranks * self.peak_flops_per_second
        return self.useful_flops / possible if possible else 0.0

    @property
    def hidden_copy_seconds(self) -> float:
        """Return the seconds of copies hidden by other work."""
        return self.copy_seconds - self.terms["copies"]

    def straggler_seconds(self, term: str = "compute") -> float:
        """Return the seconds of a term, compute or attention, in which only the busiest ranks work."""
        skew = {"compute": self.expert_skew, "attention": self.attention_skew}[term]
        return self.terms[term] * (1 - 1 / max(1.0, skew))

    def figures(self) -> dict[str, object]:
        """Return the figures of the whole step for a table or a JSON file, without arrays."""
        seconds = {name: _of_ranks(value_R) for name, value_R in self.stage_seconds.items()}
        return {
            "label": "simulated",
            "ranks": self.layout.num_ranks,
            "layout": str(self.layout),
            "seconds": self.seconds,
            "terms": dict(self.terms),
            "stage_seconds": seconds,
            "waited_before_exchanges": _of_ranks(self.waited_R),
            "bytes": {name: float(value_R.sum()) for name, value_R in self.sent_bytes.items()},
            "bytes_by_kind": self.bytes.as_dict(),
            "hidden_copy_seconds": self.hidden_copy_seconds,
            "expert_skew": self.expert_skew,
            "attention_skew": self.attention_skew,
            "utilisation": self.utilisation,
            "model_flops_utilisation": self.model_flops_utilisation,
            "notes": list(self.notes),
        }


def _of_ranks(value_R: Float64[ndarray, " R"]) -> dict[str, float]:
    return {"busiest": float(np.max(value_R)), "mean": float(np.mean(value_R))}
