"""Balance one expert-parallel training step from known routes: the idea of relibra in numpy, without relibra.

With expert parallelism each rank holds some experts of every layer. The router picks K experts for each token, and the
token travels to their ranks. Some experts are popular, so some ranks get more tokens than others, and all ranks wait
for the busiest one, in every layer of every micro-batch. In RL post-training the rollout records the choices of the
router: they are known before the training step, and the step can be planned.

    routes -> demand -> homes -> replicas -> quotas -> pushes -> seconds

token-slot   one token computed by one expert; a token makes K of them in each layer
home         the rank that holds weights and optimizer state of an expert
slot         memory of a rank for one more expert of a layer
replica      a temporary copy of an expert, in a slot of another rank
quota        token-slots that a replica computes; the home computes the rest
push         sending the weights of an expert to a slot; the gradient of the replica goes home later
skew         load of the busiest rank / load of the mean rank

Every token-slot is computed once, with the same weights: a plan changes the time of a step, not its result. relibra
decides the same things with better solvers, and executes the plan in a model (docs/planning.md, docs/execution.md).

Array names end in their axes: M micro-batches, L layers, R ranks, T tokens of a rank, K choices, E experts, B slots.
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

M, L, R, T, K, E, B = 8, 2, 8, 1024, 4, 32, 2
NODE_R = np.arange(R) // 4  # two nodes of four ranks
STATIC_E = np.arange(E) // (E // R)  # homes of plain expert parallelism: the first E / R experts on rank 0, ...

HIDDEN, WIDTH = 2880, 2880  # an expert of gpt-oss-20b: three matrices
PARAMETERS = 3 * HIDDEN * WIDTH
ROW_BYTES = 2 * HIDDEN  # one token, bf16
WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2 * PARAMETERS, 4 * PARAMETERS, 14 * PARAMETERS  # state: with fp32 and Adam
FLOPS = 0.5 * 989e12  # per second: an H100 at half of its peak
NVLINK, NETWORK = 450e9, 50e9  # bytes per second of a rank and direction: inside a node, between nodes
ATTENTION_SECONDS = T * 2 * 4 * HIDDEN**2 / FLOPS  # forward pass of a layer and micro-batch: four projections
STEPS_SERVED = 10  # moved homes serve later steps too: each pays a tenth of the move


@dataclass(frozen=True)
class Plan:
    """Homes for the step; for each micro-batch the expert in each slot (-1: none) and its quota."""

    home_LE: ndarray
    replica_MLRB: ndarray
    quota_MLRB: ndarray


def draw_routes(seed: int) -> ndarray:
    """Return the experts that the router picked for each token, [M, L, R, T, K]: drawn here, recorded in a rollout."""
    rng = np.random.default_rng(seed)  # popular experts stay popular, a little more or less in each micro-batch
    popularity_MLE = rng.normal(scale=0.9, size=(L, E)) + rng.normal(scale=0.3, size=(M, L, E))
    score_MLRTE = popularity_MLE[:, :, None, None] + rng.gumbel(size=(M, L, R, T, E))
    return np.argpartition(-score_MLRTE, K, axis=-1)[..., :K]


def count_demand(experts_MLRTK: ndarray) -> ndarray:
    """Return the token-slots of each expert, [M, L, E]: the decisions need no more of the routes."""
    return np.array([[np.bincount(layer.ravel(), minlength=E) for layer in layers] for layers in experts_MLRTK])


def rank_load(load_E: ndarray, home_E: ndarray, replica_RB: ndarray, quota_RB: ndarray) -> ndarray:
    """Return the token-slots that each rank computes: what replicas leave of its experts at home, and its replicas."""
    load_R = np.bincount(home_E, load_E, R).astype(int)
    for rank, slot in np.argwhere(replica_RB >= 0):
        load_R[rank] += quota_RB[rank, slot]
        load_R[home_E[replica_RB[rank, slot]]] -= quota_RB[rank, slot]
    return load_R


def assign_homes(load_E: ndarray) -> ndarray:
    """Return new homes, [E]: experts in order of load, each to the emptiest node, and there to the emptiest rank.

    Optimizer state moves along, so homes change between steps only. Replicas can even out ranks later, but not nodes.
    """
    home_E, load_R = np.full(E, -1), np.zeros(R, int)
    for e in np.argsort(-load_E, kind="stable"):
        has_room_R = np.bincount(home_E[home_E >= 0], minlength=R) < E // R
        node = min(np.unique(NODE_R[has_room_R]), key=lambda node: load_R[node == NODE_R].sum())
        rank = min(np.flatnonzero(has_room_R & (node == NODE_R)), key=lambda rank: load_R[rank])
        home_E[e] = rank
        load_R[rank] += load_E[e]
    return home_E


def choose_replicas(load_E: ndarray, home_E: ndarray, tolerance: float = 0.01) -> ndarray:
    """Return the expert in each slot, [R, B]; -1: none.

    In each node the busiest rank gives a replica of its largest expert to the emptiest rank with a free slot, until it
    is near the mean of the node. Replicas stay inside nodes, where links are fast, and are as few as needed.
    """
    replica_RB = np.full((R, B), -1)
    for node in np.unique(NODE_R):
        ranks = np.flatnonzero(node == NODE_R)
        while True:
            quota_RB, left_E = split_quotas(load_E, home_E, replica_RB)
            load_R = rank_load(load_E, home_E, replica_RB, quota_RB)
            busiest = max(ranks, key=lambda rank: load_R[rank])
            free = [rank for rank in ranks if -1 in replica_RB[rank] and rank != busiest]
            if not free or load_R[busiest] <= (1 + tolerance) * load_R[ranks].mean():
                break
            rank = min(free, key=lambda rank: load_R[rank])
            copied = [e for e in np.flatnonzero(home_E == busiest) if e not in replica_RB[rank]]
            replica_RB[rank, list(replica_RB[rank]).index(-1)] = max(copied, key=lambda e: left_E[e])
    return replica_RB


def split_quotas(load_E: ndarray, home_E: ndarray, replica_RB: ndarray) -> tuple[ndarray, ndarray]:
    """Return the quotas, [R, B], and the token-slots left at home, [E].

    Each replica in turn evens out its rank and the home of its expert. Every shift makes loads more even, so this ends.
    """
    load_R, left_E, quota_RB = np.bincount(home_E, load_E, R).astype(int), load_E.copy(), np.zeros((R, B), int)
    while True:
        before_RB = quota_RB.copy()
        for rank, slot in np.argwhere(replica_RB >= 0):
            e = replica_RB[rank, slot]
            shift = int((load_R[home_E[e]] - load_R[rank]) / 2)
            shift = min(max(shift, -quota_RB[rank, slot]), left_E[e])
            quota_RB[rank, slot] += shift
            left_E[e] -= shift
            load_R[rank] += shift
            load_R[home_E[e]] -= shift
        if np.array_equal(quota_RB, before_RB):
            return quota_RB, left_E


def make_plan(load_MLE: ndarray, home_LE: ndarray, *, keep: bool) -> Plan:
    """Return a plan with these homes; keep: the same replicas in all micro-batches, else the best for each.

    Replicas that stay are pushed once. Quotas cost nothing, so they follow the micro-batch in both cases.
    """
    replica_MLRB, quota_MLRB = np.zeros((2, M, L, R, B), int)
    for at in np.ndindex(M, L):
        home_E = home_LE[at[1]]
        replica_MLRB[at] = choose_replicas(load_MLE[:, at[1]].sum(axis=0) if keep else load_MLE[at], home_E)
        quota_MLRB[at], _ = split_quotas(load_MLE[at], home_E, replica_MLRB[at])
    return Plan(home_LE, replica_MLRB, quota_MLRB)


def place_tokens(experts_RTK: ndarray, home_E: ndarray, replica_RB: ndarray, quota_RB: ndarray) -> ndarray:
    """Return the rank that computes each choice, [R, T, K]; a replica takes choices of its own rank first."""
    rank_RTK, source_RTK = home_E[experts_RTK], np.broadcast_to(np.arange(R)[:, None, None], experts_RTK.shape)
    for rank, slot in np.argwhere(quota_RB > 0):
        e = replica_RB[rank, slot]
        at_home = np.flatnonzero((experts_RTK == e) & (rank_RTK == home_E[e]))
        own_first = np.argsort(source_RTK.flat[at_home] != rank, kind="stable")
        rank_RTK.flat[at_home[own_first[: quota_RB[rank, slot]]]] = rank
    return rank_RTK


def count_rows(rank_RTK: ndarray) -> ndarray:
    """Return the rows from rank to rank, [R, R]; a token with several choices on a rank is sent there once."""
    sent_RTR = np.zeros((R, T, R), bool)
    np.put_along_axis(sent_RTR, rank_RTK, True, axis=2)
    return sent_RTR.sum(axis=1)


def count_pushes(before_RB: ndarray, replica_RB: ndarray, home_E: ndarray) -> ndarray:
    """Return the pushes from home to rank, [R, R], of experts that were in no slot of the rank before."""
    pushes_RR = np.zeros((R, R), int)
    for rank, slot in np.argwhere(replica_RB >= 0):
        e = replica_RB[rank, slot]
        pushes_RR[home_E[e], rank] += e not in before_RB[rank]
    return pushes_RR


def transfer_seconds(bytes_RR: ndarray) -> float:
    """Return the seconds until the busiest link has sent and received everything; what stays on its rank is free."""
    inside_RR, away_RR = NODE_R[:, None] == NODE_R, ~np.eye(R, dtype=bool)
    links = bytes_RR * (inside_RR & away_RR) / NVLINK, bytes_RR * ~inside_RR / NETWORK
    return max(max(seconds_RR.sum(axis=0).max(), seconds_RR.sum(axis=1).max()) for seconds_RR in links)


def price_plan(plan: Plan, experts_MLRTK: ndarray) -> dict[str, float]:
    """Return milliseconds of the step by cause, skew and pushes: a model of a machine, not a measurement.

    Ranks wait for each other in every layer and micro-batch, so each cause counts with its busiest rank. Attention
    takes the same time under all plans and is left out.
    """
    load_MLE, none_RB, load_MLR = count_demand(experts_MLRTK), np.full((R, B), -1), np.zeros((M, L, R))
    seconds, pushes = dict.fromkeys(("experts", "exchange", "copies", "moves"), 0.0), 0
    for m, layer in np.ndindex(M, L):
        home_E, replica_RB, quota_RB = plan.home_LE[layer], plan.replica_MLRB[m, layer], plan.quota_MLRB[m, layer]
        load_R = load_MLR[m, layer] = rank_load(load_MLE[m, layer], home_E, replica_RB, quota_RB)
        rank_RTK = place_tokens(experts_MLRTK[m, layer], home_E, replica_RB, quota_RB)
        assert np.array_equal(load_R, np.bincount(rank_RTK.ravel(), minlength=R)), "quotas are met exactly"
        # Two flops per parameter and token-slot; the backward pass computes twice as much and sends the same rows.
        seconds["experts"] += 3 * 2 * PARAMETERS * load_R.max() / FLOPS
        seconds["exchange"] += 4 * transfer_seconds(ROW_BYTES * count_rows(rank_RTK))  # dispatch, combine, and back
        # The plan is there before the step, so copies travel beside attention; ranks wait for what takes longer.
        before_RB = plan.replica_MLRB[m - 1, layer] if m > 0 else none_RB
        after_RB = plan.replica_MLRB[m + 1, layer] if m < M - 1 else none_RB
        pushes_RR = count_pushes(before_RB, replica_RB, home_E)
        returns_RR = count_pushes(after_RB, replica_RB, home_E).T  # gradients of replicas that leave
        seconds["copies"] += max(0, transfer_seconds(WEIGHT_BYTES * pushes_RR) - ATTENTION_SECONDS)
        seconds["copies"] += max(0, transfer_seconds(GRADIENT_BYTES * returns_RR) - 2 * ATTENTION_SECONDS)
        pushes += pushes_RR.sum()
    for home_E in plan.home_LE:
        moved_RR = np.zeros((R, R))
        np.add.at(moved_RR, (STATIC_E, home_E), STATE_BYTES)
        seconds["moves"] += transfer_seconds(moved_RR) / STEPS_SERVED
    milliseconds = {cause: 1e3 * value for cause, value in {"step": sum(seconds.values()), **seconds}.items()}
    return {**milliseconds, "skew": load_MLR.max(axis=2).sum() / load_MLR.mean(axis=2).sum(), "pushes": pushes}


def main() -> None:
    experts_MLRTK = draw_routes(seed=0)
    load_MLE = count_demand(experts_MLRTK)
    static_LE, none_MLRB = np.tile(STATIC_E, (L, 1)), np.full((M, L, R, B), -1)
    new_LE = np.array([assign_homes(load_E) for load_E in load_MLE.sum(axis=0)])
    # Replicas that change are even in each micro-batch, but pushed often. New homes even out nodes, but state moves.
    plans = {
        "static": Plan(static_LE, none_MLRB, np.zeros_like(none_MLRB)),
        "replicas change": make_plan(load_MLE, static_LE, keep=False),
        "replicas stay": make_plan(load_MLE, static_LE, keep=True),
        "new homes, replicas change": make_plan(load_MLE, new_LE, keep=False),
        "new homes, replicas stay": make_plan(load_MLE, new_LE, keep=True),
    }
    prices = {name: price_plan(plan, experts_MLRTK) for name, plan in plans.items()}
    print(f"{'plan, milliseconds by cause':<27}" + "".join(f"{column:>9}" for column in prices["static"]))
    for name, price in prices.items():
        print(f"{name:<27}" + "".join(f"{value:9.4g}" for value in price.values()))
    fastest = min(prices, key=lambda name: prices[name]["step"])
    print(f"fastest: {fastest}, static / this {prices['static']['step'] / prices[fastest]['step']:.2f}")
    plan = plans[fastest]
    rank, slot = np.argwhere(plan.replica_MLRB[0, 0] >= 0)[0]
    e = plan.replica_MLRB[0, 0, rank, slot]
    print(f"expert {e} of layer 0: home rank {plan.home_LE[0, e]}, replica on rank {rank}")
    print(f"  token-slots in each micro-batch {load_MLE[:, 0, e]}")
    print(f"  quota of the replica            {plan.quota_MLRB[:, 0, rank, slot]}")


if __name__ == "__main__":
    main()

# Output:
# plan, milliseconds by cause     step  experts exchange   copies    moves     skew   pushes
# static                         50.55    31.34    19.21        0        0    1.584        0
# replicas change                41.73    21.61    17.28    2.845        0    1.092       59
# replicas stay                  39.84    22.25    17.09   0.5027        0    1.124       12
# new homes, replicas change      45.3     20.6    15.41    3.713    5.574    1.041       70
# new homes, replicas stay       43.88    22.89    15.42        0    5.574    1.157        7
# fastest: replicas stay, static / this 1.27
# expert 2 of layer 0: home rank 0, replica on rank 2
#   token-slots in each micro-batch [2346 1182 1328 1352 1196 1242 1800 2192]
#   quota of the replica            [1394    0 1328 1352  535    0 1176  700]
