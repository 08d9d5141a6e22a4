"""Search of homes: which rank owns each expert during a step.

In: loads per micro-batch, layer and expert. Out: `home_LE`. Start with `place_homes` in `nodes_and_ranks.py`, which
`balancers/relibra.py` calls for each layer. With the objective in seconds, `_choose_cheaper_homes` there may overrule
the result and leave experts where they are. Experts move to the homes in `parallel/homes`.
"""
