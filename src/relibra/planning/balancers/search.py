"""search prototype"""
from __future__ import annotations
import time
from dataclasses import replace
import numpy as np
from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.layer_plans import *
from relibra.planning.balancers.layer_plans import SlotChoice, LayerChoice, plan_layers, cheapest_layers, step_seconds
from relibra.planning.balancers.pilot import pilot_of, pilot_micro_batches
NUMBERS = (1, 2, 4, 8, 16, 32)
PUSH_PRICES = (0.0, 0.5, 1.0)
LOG = []

def slot_choices(request, limit):
    E, R = request.previous.num_experts, request.cluster.num_ranks
    out = [SlotChoice(number=n, resident=False) for n in (1, 2)]
    out += [SlotChoice(number=n, resident=True) for n in NUMBERS if n <= limit]
    return out

def first_choices(request, slots):
    t, several = request.budget.tolerance, request.cluster.num_nodes > 1
    n = slots.number
    if not slots.resident:
        return [LayerChoice(tolerance=5*t)] + ([LayerChoice(tolerance=5*t, cross_node=True)] if several else [])
    scopes = (False, True) if several else (False,)
    out = [LayerChoice(tolerance=5*t, cross_node=x) for x in scopes]
    out += [LayerChoice(tolerance=5*t, cross_node=several, traffic_slots=k) for k in sorted({max(1, n//2), n})]
    return out

def try_choices(request, demand, slots):
    t = request.budget.tolerance
    plans = {LayerChoice(): plan_layers(request, demand, slots, LayerChoice())}
    def cost(choice): p = plans[choice]; return (p.waits_ML + p.queue_ML).sum() + p.moves_L.sum()
    def add(cs):
        for c in cs:
            if c not in plans: plans[c] = plan_layers(request, demand, slots, c)
    add(first_choices(request, slots))
    best = sorted((c for c in plans if c.tolerance is not None), key=cost)[:2]
    add([replace(c, tolerance=x) for c in best for x in (t, 20*t)])
    best = sorted((c for c in plans if c.tolerance is not None), key=cost)[:2]
    homes = ["in nodes"] + (["over nodes"] if request.cluster.num_nodes > 1 else [])
    add([replace(c, homes=h) for c in [*best, LayerChoice()] for h in homes])
    return plans

def mix(request, demand, slots, plans):
    worth = 0.05 if request.warm else 0.0
    options = []
    for price in PUSH_PRICES if slots.resident else (0.0,):
        m = cheapest_layers(plans, demand, slots, push_price=price, worth_moving=worth)
        options.append((step_seconds(request, demand, slots, m), price, m))
    return min(options, key=lambda o: o[0])

def search(request, limit, full=False):
    sample = request if full else pilot_of(request, request.demand, micro_batches=pilot_micro_batches(request.demand))
    tried = {}
    for slots in slot_choices(request, limit):
        plans = try_choices(sample, sample.demand, slots)
        sec, price, m = mix(sample, sample.demand, slots, plans)
        tried[slots] = (sec, price, plans, m)
    best = min(tried, key=lambda s: tried[s][0])
    sec, price, plans, m = tried[best]
    return tried, best

def finish(request, tried, best, width=4):
    sec, price, plans, m = tried[best]
    wins = {}
    for c, p in plans.items():
        same = (p.replica_MLRB == m.replica_MLRB).all(axis=(2,3)) & (p.home_LE == m.home_LE).all(axis=1)
        wins[c] = same.sum()
    chosen = sorted(wins, key=lambda c: -wins[c])[:width]
    if not any(c.homes == "stay" for c in chosen): chosen.append(LayerChoice())
    full = {c: plan_layers(request, request.demand, best, c) for c in chosen}
    return mix(request, request.demand, best, full), {c: wins[c] for c in chosen}
