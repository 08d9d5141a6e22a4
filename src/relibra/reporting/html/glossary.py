"""The section that explains the words of a page."""

from __future__ import annotations

from relibra.reporting.html.html import definitions, section

LOAD_WORDS = (
    (
        "Expert",
        "One of several feed-forward networks in a layer of a Mixture-of-Experts (MoE) model; a router sends each "
        "token to a few of them.",
    ),
    (
        "Token-slot",
        "One token at one of the experts it chose. A token with 4 choices makes 4 token-slots in each layer.",
    ),
    ("Load", "Token-slots that an expert, or a rank, has to compute."),
    ("Rank", "One process, usually one GPU, of the group that shares the experts of a layer (expert parallelism)."),
    (
        "Micro-batch",
        "Tokens that pass through the model together. Where they are cut from a recording: consecutive recorded "
        "tokens; the remainder of a step is one too.",
    ),
    (
        "Skew",
        "Largest load / mean load. 1 is even; 2 means that the busiest has twice the mean. Rank skew compares ranks, "
        "expert skew compares experts. Load-weighted: the loads of the busiest ranks / the mean loads, each summed "
        "over all micro-batches and layers.",
    ),
    (
        "Expert time",
        "The time that expert layers take, assumed to grow with token-slots. All ranks wait for the busiest before "
        "the next layer, so at a load-weighted skew s they wait 1 − 1/s of it on average.",
    ),
    (
        "Static layout",
        "Experts stay where they are: with E experts on R ranks the first E/R are on rank 0, the next E/R on rank 1, "
        "and so on. Training without a balancer does this.",
    ),
)
"""Words of every page about loads."""

ROUTE_WORDS = (
    ("Cosine", "How alike two loads are as directions: 1 is the same mix of experts, 0 is no expert in common."),
)

PLAN_WORDS = (
    ("Home", "The rank that owns an expert for the whole step, with its optimizer state."),
    (
        "Replica, slot",
        "A replica is a copy of an expert’s weights in a spare slot of another rank, for one micro-batch and layer. "
        "A slot is memory for the weights of one expert.",
    ),
    (
        "Levers",
        "What a plan may change: the micro-batch and the rank of each sample (schedule), the rank that owns each "
        "expert (homes), replicas on ranks of the same node, replicas on other nodes (cross-node copies).",
    ),
    (
        "Bound",
        "The lowest skew that any replicas and any split of tokens can reach with the plan’s homes, schedule, slots "
        "and permitted nodes for replicas. It follows from counting.",
    ),
    ("Gap", "Skew / bound − 1."),
    (
        "Simulated",
        "Computed from a model of the machine: link rates, flops and latencies; see docs/simulation.md. Nothing was "
        "measured.",
    ),
)
"""Words of pages about plans."""


def glossary(*words: tuple[tuple[str, str], ...]) -> str:
    """Explain the given groups of words."""
    return section("glossary", "Words", definitions([pair for group in words for pair in group]))
