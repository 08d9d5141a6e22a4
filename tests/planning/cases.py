"""Loads and machines that the planning tests share."""

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from relibra.cluster import cluster_preset
from relibra.routing.demand import Demand

DATA = Path(__file__).parents[3] / "shared" / "data"
"""Recorded routes of real models, where they are there."""


def seconds_of(plan, budget):
    """Return the predicted seconds with the part of the moves that one of the steps served pays."""
    relocation = plan.predicted["relocation"]
    return plan.predicted["total"] - relocation * (1 - 1 / budget.steps_served)


def cluster(num_nodes, ranks_per_node):
    return cluster_preset("h100x8", num_nodes * ranks_per_node, ranks_per_node)


def make_demand(num_samples, num_layers, num_experts, num_micro_batches, num_ranks, seed, *, sigma=0.8, tokens=64):
    """Samples with their own hot experts, dealt to micro-batches and ranks in turn."""
    rng = np.random.default_rng(seed)
    popularity = rng.lognormal(0, sigma, (num_samples, num_layers, num_experts))
    popularity *= rng.lognormal(0, sigma, (1, num_layers, num_experts))
    popularity /= popularity.sum(axis=2, keepdims=True)
    lengths = rng.integers(1, tokens + 1, num_samples)
    counts = np.stack(
        [
            np.stack([rng.multinomial(4 * n, popularity[s, layer]) for layer in range(num_layers)])
            for s, n in enumerate(lengths)
        ]
    )
    demand = Demand(
        counts_SLE=counts.astype(np.int32),
        layer_ids=np.arange(num_layers, dtype=np.int32),
        sample_ids=np.arange(num_samples),
        top_k=4,
    )
    samples = np.arange(num_samples)
    return demand.with_schedule(
        (samples % num_micro_batches).astype(np.int32),
        (samples // num_micro_batches % num_ranks).astype(np.int32),
        num_ranks,
    )


@st.composite
def machines(draw):
    """(nodes, ranks per node, experts per rank)."""
    return draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))


@st.composite
def demands(draw):
    """A demand and a machine: zero loads, one hot expert, power laws, empty micro-batches and ranks."""
    nodes, ranks, per_rank = draw(machines())
    R, E = nodes * ranks, nodes * ranks * per_rank
    M, L, S = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["even", "power law", "one hot", "sparse", "nothing"]))
    if kind == "power law":
        counts = (3e4 ** rng.random((S, L, E))).astype(np.int32)
    elif kind == "one hot":
        counts = np.zeros((S, L, E), dtype=np.int32)
        counts[:, :, rng.integers(E)] = rng.integers(1, 5000, (S, 1))
    elif kind == "sparse":
        counts = (rng.integers(0, 50, (S, L, E)) * (rng.random((S, L, E)) < 0.2)).astype(np.int32)
    elif kind == "nothing":
        counts = np.zeros((S, L, E), dtype=np.int32)
    else:
        counts = rng.integers(0, 20, (S, L, E)).astype(np.int32)
    demand = Demand(counts_SLE=counts, layer_ids=np.arange(L, dtype=np.int32), sample_ids=np.arange(S), top_k=min(2, E))
    micro_batch_S = rng.integers(-1, M, S).astype(np.int32)
    micro_batch_S[0] = M - 1  # so that there is one; earlier ones may be empty
    return demand.with_schedule(micro_batch_S, rng.integers(0, R, S).astype(np.int32), R), cluster(nodes, ranks)
