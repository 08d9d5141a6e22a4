"""How many ranks each node gets: the same number on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Nodes of a run, and ranks on each; ranks of a node have consecutive numbers."""

    num_nodes: int
    ranks_per_node: int


def possible_layouts(num_ranks: int, room_N: Sequence[int]) -> list[Layout]:
    """Return the layouts for which there is room, those with fewer nodes first.

    Nodes are equal because a plan's `Cluster` has as many ranks on each.

    room_N   ranks that fit on each node

    >>> possible_layouts(4, [2, 3])
    [Layout(num_nodes=2, ranks_per_node=2)]
    >>> possible_layouts(4, [3, 1])
    []
    """
    layouts = [Layout(nodes, num_ranks // nodes) for nodes in range(1, num_ranks + 1) if num_ranks % nodes == 0]
    return [one for one in layouts if sum(room >= one.ranks_per_node for room in room_N) >= one.num_nodes]


def resources_of_ranks(num_ranks: int, threads_per_rank: int, *, gpus: bool) -> dict[str, int]:
    """Return what Ray reserves for some ranks: a CPU for each thread, and a GPU for each rank."""
    return {"CPU": num_ranks * threads_per_rank, **({"GPU": num_ranks} if gpus else {})}


def room_for_ranks(resources: Mapping[str, float], threads_per_rank: int, *, gpus: bool) -> int:
    """Return how many ranks fit on a node.

    resources   of the node, by Ray's names

    >>> room_for_ranks({"CPU": 16.0, "GPU": 4.0}, 2, gpus=True)
    4
    """
    needed = resources_of_ranks(1, threads_per_rank, gpus=gpus)
    return min(int(resources.get(name, 0.0) // amount) for name, amount in needed.items())


def describe_need(num_ranks: int, threads_per_rank: int, room_N: Sequence[int], *, gpus: bool) -> str:
    """Return in words what the ranks need, and what there is.

    room_N   ranks that fit on each node where nothing else runs

    >>> describe_need(4, 1, [2, 1], gpus=True)
    "4 ranks, each with 1 CPU and 1 GPU, need nodes with the same number of ranks; Ray's nodes have room for 2, 1"
    """
    each = " and ".join(
        f"{amount} {name}" for name, amount in resources_of_ranks(1, threads_per_rank, gpus=gpus).items()
    )
    room = ", ".join(map(str, room_N)) or "none"
    busy = " where nothing else runs" if possible_layouts(num_ranks, room_N) else ""
    return (
        f"{num_ranks} ranks, each with {each}, need nodes with the same number of ranks; Ray's nodes have room for "
        f"{room}{busy}"
    )


def has_room(resources: Mapping[str, float], needed: Mapping[str, int]) -> bool:
    """Return whether a node has what is needed, where nothing else runs."""
    return all(resources.get(name, 0.0) >= amount for name, amount in needed.items())


def describe_servers(num_servers: int, needed: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return in words what rollout servers need beside the ranks, and what there is.

    needed   by a server, on one node
    nodes    all that each has

    >>> describe_servers(1, {"CPU": 4}, [{"CPU": 1.0}, {"CPU": 2.0}])
    "1 rollout server with 4 CPU needs room on a node, beside the ranks; Ray's nodes have 2 CPU, 1 CPU in all"
    """
    each = " and ".join(f"{amount} {name}" for name, amount in needed.items())
    has_N = sorted(([one.get(name, 0.0) for name in needed] for one in nodes), reverse=True)
    there = [" and ".join(f"{has:g} {name}" for has, name in zip(one, needed, strict=True)) for one in has_N]
    many = f"{num_servers} rollout servers, each with {each}, need" if num_servers > 1 else ""
    return (
        f"{many or f'1 rollout server with {each} needs'} room on a node, beside the ranks; Ray's nodes have "
        f"{', '.join(there) or 'none'} in all"
    )
