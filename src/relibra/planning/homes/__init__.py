"""Homes: which rank owns each expert during a step.

In: loads per micro-batch, layer and expert. Out: `home_LE`. Start with `place_homes` in `home_search.py`, which
`balancers/relibra.py` calls for each layer; `balancers/homes.py` has the homes of baselines.
"""
