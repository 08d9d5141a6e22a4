"""Chains of `planning.levers.replication` that know what slots hold: replicas of a micro-batch, with a bonus to stay.

As there, a rank may give away more than its excess if that fills a target exactly.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from relibra.planning.levers.replication import score_move, slot_of
from relibra.routing.compiled import compiled

_IN_USE = 6.0
"""Score of a move to a replica that this chain uses already, as a share of the ceiling: above all others."""
_FUTURE = 0.2
"""Score of a new replica per unit of expected need, as a share of the ceiling."""
_OTHER_NODE = 0.5
"""Cost of a move to another node, as a share of the ceiling."""


@compiled
@no_type_check
def choose_anew(layer, low, high, ceiling, future_E, scoring, bonus, held_RB, used_RB, load_R, left_E) -> int:
    """Lower ranks low .. high - 1 to the ceiling as far as chains can; return the number of new replicas.

    scoring         how moves are scored (`replication.score_move`)
    bonus           for an expert that is in a slot of the target, as a share of the ceiling
    held_RB         experts in slots; those that the chain does not use may be replaced
    used_RB         in and out: slots that may not be emptied; the chain adds those that it uses
    load_R, left_E  load of each rank, and of each expert at home
    """
    added = 0
    for _ in range(8 * (high - low) * held_RB.shape[1] + 8):
        s = low + np.argmax(load_R[low:high])
        if load_R[s] <= ceiling:
            break
        e, t, x = _best_move(s, layer, low, high, ceiling, future_E, scoring, bonus, held_RB, used_RB, load_R, left_E)
        if e < 0:
            break
        b = slot_of(e, held_RB[t])
        if b < 0:
            b = _slot_to_fill(future_E, held_RB[t], used_RB[t])
            held_RB[t, b] = e
            added += 1
        used_RB[t, b] = True
        load_R[t] += x
        load_R[s] -= x
        left_E[e] -= x
    return added


@compiled
@no_type_check
def _best_move(s, layer, low, high, ceiling, future_E, scoring, bonus, held_RB, used_RB, load_R, left_E):
    """Return the expert that rank `s` gives away, the rank that takes it, and how many token-slots; expert -1: none."""
    excess, fillable = load_R[s] - ceiling, not used_RB[s].all()
    G = layer.ranks_per_node
    best, best_e, best_t, best_x = -1.0, -1, -1, 0
    for i in range(layer.starts[s], layer.starts[s + 1]):
        e = layer.order_E[i]
        if left_E[e] == 0:
            continue
        for t in range(low, high):
            room = ceiling - load_R[t]
            if room <= 0:
                continue
            x, b = min(excess, room, left_E[e]), slot_of(e, held_RB[t])
            if b >= 0 and used_RB[t, b]:
                score = _IN_USE * ceiling + x
            elif b < 0 and used_RB[t].all():
                continue
            else:
                if left_E[e] >= room and fillable:
                    x = room
                score = float(score_move(scoring, x, excess, room, left_E[e], ceiling))
                score += bonus * ceiling if b >= 0 else _FUTURE * ceiling * future_E[e]
            if t // G != s // G:
                score -= _OTHER_NODE * ceiling
            if score > best:
                best, best_e, best_t, best_x = score, e, t, x
    return best_e, best_t, best_x


@compiled
@no_type_check
def _slot_to_fill(future_E, held_B, used_B) -> int:
    """Return an unused slot: an empty one, or that whose expert is needed least later."""
    best, best_b = 0.0, -1
    for b in range(len(held_B)):
        if used_B[b]:
            continue
        need = -1.0 if held_B[b] < 0 else future_E[held_B[b]]
        if best_b < 0 or need < best:
            best, best_b = need, b
    return best_b
