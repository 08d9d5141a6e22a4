"""Limits of a model on a cluster: the overlap ratio, known without simulation, and sentences about a simulated step."""

from __future__ import annotations

from relibra.cluster import Cluster
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.simulation.memory import MemoryUse
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.step.step_result import SimulatedStep
from relibra.simulation.units import bytes_in_words, seconds_in_words

_SMALLEST_SHARE = 0.01
"""Parts of the step below this share are left out of the advice."""
_SENTENCES = {
    "even compute": "Work: experts take {seconds} even with equal load on all ranks",
    "uneven compute": "Straggler: {seconds} of experts are waiting for the busiest rank; more even expert load reduces "
    "it",
    "even attention": "Work: attention and dense parts take {seconds} even with equal load on all ranks",
    "uneven attention": "Straggler: {seconds} of attention and dense parts are waiting for the busiest rank; placing "
    "or packing samples reduces it",
    "host": "Host: launches, host work and live decisions take {seconds}; fewer, larger micro-batches reduce it",
    "exchange": "Traffic: rows between ranks take {seconds}; experts that are picked together on one rank reduce it",
    "gathers": "FSDP: gathers of dense weights take {seconds}, exposed; fewer, larger micro-batches reduce them",
    "copies": "Copies: {seconds} of expert copies are exposed, {hidden} hidden; fewer replicas reduce it",
    "pipeline": "Pipeline: the busiest stage waits {seconds} for others",
    "gradients": "Gradients: their sums over ranks take {seconds}, exposed",
    "optimizer": "Optimizer: {seconds}",
    "relocation": "Relocation: experts change homes for {seconds} of the step; later steps move only what changes",
}
"""Sentence of each part of a step: its terms, those of experts and attention divided; gates belong to the exchange."""


def overlap_ratio(expert: ExpertShape, bytes_per_second: float, peak_flops_per_second: float) -> float:
    """Return seconds that one token-slot computes in its expert / seconds that it travels, there and back.

    Above 1 a layer could hide its exchange behind its experts, if GEMMs ran at peak and every choice travelled by
    itself. For gated bf16 experts this is 1.5 width x bandwidth / peak: neither hidden, K nor E matter (MegaScale-MoE,
    arXiv 2505.11432).

    bytes_per_second   in one direction

    >>> round(overlap_ratio(ExpertShape(hidden=7168, width=2048), 50e9, 989e12), 2)
    0.16
    """
    computing = expert.flops_per_token_slot / peak_flops_per_second
    return computing / (2 * expert.row_bytes / bytes_per_second)


def overlap_ratios(cluster: Cluster, expert: ExpertShape) -> dict[str, float]:
    """Return the overlap ratio "inside a node" and, where there are several, "between nodes"."""
    links = {"inside a node": cluster.intra}
    if cluster.num_nodes > 1:
        links["between nodes"] = cluster.inter_send
    return {
        where: overlap_ratio(expert, link.bytes_per_second, cluster.peak_flops_per_second)
        for where, link in links.items()
    }


def sustained_overlap_ratios(cluster: Cluster, expert: ExpertShape) -> dict[str, float]:
    """Return `overlap_ratios` at the flops that grouped GEMMs sustain, with which steps are simulated."""
    return {where: ratio / cluster.efficiency for where, ratio in overlap_ratios(cluster, expert).items()}


def advice(step: SimulatedStep, cluster: Cluster, model: ModelShape, memory: MemoryUse | None = None) -> list[str]:
    """Return sentences about what limits the step: the ratio of work to traffic, then its parts, the largest first.

    cluster   of one expert-parallel group
    memory    of `memory_use`: a sentence about what does not fit
    """
    found = []
    for name, seconds, sentence in _parts(step):
        share = seconds / step.seconds if step.seconds else 0.0
        if share >= _SMALLEST_SHARE:
            found.append((-seconds, name, f"{sentence} ({share:.0%} of {seconds_in_words(step.seconds)})."))
    sentences = [_of_overlap(step, cluster, model), *(sentence for _, _, sentence in sorted(found))]
    if memory is not None:
        gain = memory.activations_static - memory.parts["activations"]
        if memory.activations_static and gain / memory.activations_static >= _SMALLEST_SHARE:
            slots = memory.parts["slots"]
            price = f"; spare slots take {bytes_in_words(slots)}" if slots else ""
            sentences.append(
                f"Balance saves {bytes_in_words(gain)} of activations on the fullest rank "
                f"({bytes_in_words(memory.activations_static)} without){price}."
            )
        if memory.warning:
            sentences.append(f"Memory: {memory.warning}.")
    return sentences


def _parts(step: SimulatedStep) -> list[tuple[str, float, str]]:
    """Return (name, seconds, sentence without its end) of each part."""
    seconds = {**step.terms, "exchange": step.terms["exchange"] + step.terms["gates"]}
    for term in ("compute", "attention"):
        lost = step.straggler_seconds(term)
        seconds |= {f"even {term}": step.terms[term] - lost, f"uneven {term}": lost}
    hidden = seconds_in_words(step.hidden_copy_seconds)
    return [
        (name, seconds[name], sentence.format(seconds=seconds_in_words(seconds[name]), hidden=hidden))
        for name, sentence in _SENTENCES.items()
    ]


def _of_overlap(step: SimulatedStep, cluster: Cluster, model: ModelShape) -> str:
    """Return the sentence about the ratio at peak flops (its definition) and sustained flops, and simulated seconds."""
    ratios = overlap_ratios(cluster, model.expert)
    peak = " and ".join(f"{ratio:.2f} {where}" for where, ratio in ratios.items())
    sustained = " and ".join(f"{ratio:.2f}" for ratio in sustained_overlap_ratios(cluster, model.expert).values())
    exchange, compute = step.terms["exchange"] + step.terms["gates"], step.terms["compute"]
    counts = "traffic counts for more than balance" if exchange > compute else "balance counts for more than traffic"
    return (
        f"Overlap ratio (seconds of experts per second of travel of a token-slot): {peak} at peak flops, {sustained} "
        f"at sustained flops; in this step rows travel for {seconds_in_words(exchange)} and experts compute for "
        f"{seconds_in_words(compute)}, so {counts}."
    )
