"""Drop-in `rebalance_experts` for DeepSeek's EPLB, vLLM and SGLang: their signatures and results, placement by relibra.

Loads may be numpy arrays, torch tensors or nested lists. Maps come back as int64 on the CPU: torch tensors for torch
tensors, else numpy arrays. The placement is that of `even_placement`, whose busiest rank is never above EPLB's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from relibra.errors import PlanError
from relibra.planning.balancers.even_placement import even_placement
from relibra.planning.balancers.physical_placement import count_copies
from relibra.planning.baselines.eplb import experts_by_node


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Return a placement of every layer, with the signature and results of DeepSeek's EPLB.

    >>> phy2log, log2phy, logcnt = rebalance_experts([[90, 132, 40, 61]], 6, 1, 1, 2)
    >>> print(phy2log, logcnt)
    [[1 3 2 1 0 0]] [[2 2 1 1]]
    >>> log2phy.tolist()
    [[[4, 5], [0, 3], [2, -1], [1, -1]]]

    weight         [L, E] load of each expert, any unit
    num_replicas   P, physical slots over all ranks, a multiple of `num_gpus`, at least E
    num_groups     groups of experts that must stay on one node; ignored unless nodes divide groups, as in EPLB
    returns        `phy2log` [L, P] expert of each slot, `log2phy` [L, E, X] slots of each expert padded with -1, and
                   `logcnt` [L, E] copies of each expert
    raises         PlanError for numbers that do not fit together
    """
    load_TLE = _loads(weight, "weight", 2)[None]
    map_LP = _place(load_TLE, num_replicas, num_groups, num_nodes, num_gpus)
    return _results(map_LP, load_TLE.shape[2], weight)


class RelibraEplbPolicy:
    """An expert-placement policy for vLLM: assign it to `EPLB_POLICIES["default"]`.

    >>> print(RelibraEplbPolicy.rebalance_experts([[90, 132, 40, 61]], 6, 1, 1, 2))
    [[1 3 2 1 0 0]]
    """

    @classmethod
    def rebalance_experts(
        cls,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Any = None,
    ) -> Any:
        """Return a placement of every layer, permuted inside nodes and ranks so that few experts move from an old map.

        weight                      [L, E] load of each expert
        old_global_expert_indices   [L, P] the present map: ranks swap their new experts inside a node so that most
                                    experts stay on their rank, and those stay in their slots
        returns                     `physical_to_logical_map` [L, P]
        raises                      PlanError for numbers that do not fit together
        """
        load_TLE = _loads(weight, "weight", 2)[None]
        map_LP = _place(load_TLE, num_replicas, num_groups, num_nodes, num_ranks)
        if old_global_expert_indices is not None:
            old_LP = _array(old_global_expert_indices).astype(np.int64)
            if old_LP.shape == map_LP.shape:  # a map of another size has no slots to keep
                per_node = max(1, num_ranks // num_nodes)  # nodes need not divide ranks where they are ignored
                pairs = zip(map_LP, old_LP, strict=True)
                map_LP = np.stack([_keep_in_place(new_P, old_P, num_ranks, per_node) for new_P, old_P in pairs])
        return _like(map_LP, weight)


def policy_of_placement(physical_to_logical_map: Int64[ndarray, "L P"], *, source: str) -> type[RelibraEplbPolicy]:
    """Return a policy that always places experts as a plan says, whatever the loads.

    source   of the placement, for messages
    """

    class PlannedPlacement(RelibraEplbPolicy):
        """The placement of a plan; see `policy_of_placement`."""

        @classmethod
        def rebalance_experts(cls, weight: Any, num_replicas: int, *_: Any, **__: Any) -> Any:
            """Return the placement.

            raises    PlanError where the engine has other layers, experts or slots
            """
            L, E = _loads(weight, "weight", 2).shape
            planned = (*physical_to_logical_map.shape, int(physical_to_logical_map.max(initial=-1)) + 1)
            if planned != (L, num_replicas, E):
                raise PlanError(
                    f"{source} places experts of {planned[0]} layers into {planned[1]} slots ({planned[2]} experts), "
                    f"and the engine has {L} layers, {num_replicas} slots and {E} experts: plan with the engine's "
                    "ranks, and with as many slots per rank as it has redundant experts"
                )
            return _like(physical_to_logical_map, weight)

    return PlannedPlacement


def rebalance_experts_sglang(
    tokens_per_expert: Any,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: Any = "auto",
) -> tuple[Any, Any, Any]:
    """Return a placement of every layer from the loads of several steps, with SGLang's keywords and results.

    >>> physical_to_logical, _, _ = rebalance_experts_sglang([[[90, 132, 40, 61]]], 6, 3, None, 1)
    >>> print(physical_to_logical)
    [[1 3 2 1 0 0]]

    tokens_per_expert            [steps, L, E], or [L, E]: the sum over steps of the busiest rank is minimised
    num_local_physical_experts   slots of a rank
    algorithm                    a name or enum member: "auto" and names that end in "hierarchical" keep groups on one
                                 node if nodes divide groups; other names ignore groups
    returns                      as `rebalance_experts`
    raises                       PlanError for numbers that do not fit together
    """
    loads = _loads(tokens_per_expert, "tokens_per_expert", 2, 3)
    load_TLE = loads if loads.ndim == 3 else loads[None]
    name = str(getattr(algorithm, "name", algorithm))
    grouped = name.endswith("hierarchical") or name == "auto"
    if num_local_physical_experts < 1 or num_physical_experts % num_local_physical_experts:
        raise PlanError(
            f"{num_physical_experts} physical experts do not fill ranks of {num_local_physical_experts}: use a multiple"
        )
    groups, nodes = (num_groups, num_nodes) if grouped and num_groups else (1, 1)
    map_LP = _place(load_TLE, num_physical_experts, groups, nodes, num_physical_experts // num_local_physical_experts)
    return _results(map_LP, load_TLE.shape[2], tokens_per_expert)


def _place(
    load_TLE: Float64[ndarray, "T L E"], num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> Int64[ndarray, "L P"]:
    """Place the experts of every layer, node by node where nodes divide groups; T counts steps."""
    E = load_TLE.shape[2]
    for name, number in (("groups", num_groups), ("nodes", num_nodes), ("ranks", num_ranks), ("experts", E)):
        if number < 1:
            raise PlanError(f"{number} {name}: at least 1 is needed")
    if num_slots < E or num_slots % num_ranks:
        raise PlanError(
            f"{num_slots} physical experts for {E} experts on {num_ranks} ranks: use a multiple of {num_ranks} that is "
            f"at least {E}"
        )
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    if E % num_groups or num_ranks % num_nodes:
        raise PlanError(
            f"{num_groups} groups of {E} experts, {num_nodes} nodes of {num_ranks} ranks: groups must divide experts, "
            "nodes must divide ranks"
        )
    node_ranks, rank_slots, node_experts = num_ranks // num_nodes, num_slots // num_ranks, E // num_nodes
    map_LP = np.empty((load_TLE.shape[1], num_slots), dtype=np.int64)
    for layer in range(len(map_LP)):
        load_TE = load_TLE[:, layer]
        by_node = experts_by_node(load_TE.sum(axis=0).astype(np.float32), num_groups, num_nodes)
        for node in range(num_nodes):
            here = by_node[node * node_experts : (node + 1) * node_experts]
            first = node * node_ranks * rank_slots
            placement_RP = even_placement(load_TE[:, here], node_ranks, rank_slots)
            map_LP[layer, first : first + node_ranks * rank_slots] = here[placement_RP].ravel()
    return map_LP


def _keep_in_place(
    new_P: Int64[ndarray, " P"], old_P: Int64[ndarray, " P"], num_ranks: int, ranks_per_node: int
) -> Int64[ndarray, " P"]:
    """Permute ranks inside each node, and slots inside each rank, so that most experts stay where they are."""
    new_RP, old_RP = new_P.reshape(num_ranks, -1), old_P.reshape(num_ranks, -1)
    num_experts = int(max(new_P.max(), old_P.max())) + 1
    old_RE, new_RE = count_copies(old_RP, num_experts), count_copies(new_RP, num_experts)
    kept_RR = np.minimum(old_RE[:, None], new_RE[None]).sum(axis=2)
    result_RP = np.full_like(new_RP, -1)
    for first in range(0, num_ranks, ranks_per_node):
        node = slice(first, first + ranks_per_node)
        for rank, new_rank in zip(*linear_sum_assignment(kept_RR[node, node], maximize=True), strict=True):
            waiting = new_RP[first + new_rank].tolist()
            for slot, expert in enumerate(old_RP[first + rank].tolist()):
                if expert in waiting:
                    result_RP[first + rank, slot] = expert
                    waiting.remove(expert)
            result_RP[first + rank, result_RP[first + rank] < 0] = waiting
    return result_RP.ravel()


def _results(map_LP: Int64[ndarray, "L P"], num_experts: int, like: Any) -> tuple[Any, Any, Any]:
    """Return the maps from slots to experts and from experts to slots, and the copies of each expert."""
    count_LE = np.stack([np.bincount(map_P, minlength=num_experts) for map_P in map_LP])
    slots_LEX = np.full((*count_LE.shape, int(count_LE.max())), -1, dtype=np.int64)
    order_LP = np.argsort(map_LP, axis=1, kind="stable")
    for layer, order_P in enumerate(order_LP):
        expert_P = map_LP[layer, order_P]
        copy_P = np.arange(len(expert_P)) - np.searchsorted(expert_P, expert_P)
        slots_LEX[layer, expert_P, copy_P] = order_P
    return _like(map_LP, like), _like(slots_LEX, like), _like(count_LE.astype(np.int64), like)


def _array(values: Any) -> ndarray:
    """Return array-like values as numpy; floating torch tensors become float64, as numpy lacks bfloat16."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values)


def _loads(values: Any, name: str, *dimensions: int) -> Float64[ndarray, ...]:
    array = _array(values)
    if array.ndim not in dimensions or 0 in array.shape or array.dtype.kind not in "biuf":
        raise PlanError(
            f"{name} has shape {array.shape} and type {array.dtype}: numbers with the non-empty axes "
            f"{'[layers, experts]' if 3 not in dimensions else '[steps, layers, experts]'} are needed"
        )
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        raise PlanError(f"{name} has negative or non-finite loads: they must be 0 or more")
    return numbers


def _like(array: Int[ndarray, ...], like: Any) -> Any:
    """Return int64 numbers as a torch tensor where a tensor was given, without importing torch."""
    if not hasattr(like, "new_tensor"):
        return array
    return like.detach().cpu().new_empty(0).long().new_tensor(array.tolist())  # never in the type of `like`
