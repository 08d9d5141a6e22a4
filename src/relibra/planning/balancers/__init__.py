"""Balancers for use, and steps that balancers share: even placements, resident replicas, shares of token-slots.

In: a `PlacementRequest`. Out: a `Placement`. Start with `relibra.py`; `planning/registry.py` lists every balancer.
"""
