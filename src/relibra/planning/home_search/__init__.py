"""Search of homes: which rank owns each expert during a step.

In: loads per micro-batch, layer and expert. Out: `home_LE`. Start with `place_homes` in `nodes_and_ranks.py`, which
`balancers/relibra.py` calls for each layer. Experts move to the homes in `parallel/homes`.
"""
