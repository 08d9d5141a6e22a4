"""Search of homes: which rank owns each expert during a step.

In: loads per micro-batch, layer and expert. Out: `home_LE`. Start with `place_homes` in `nodes_and_ranks.py`, which
`search_homes` in `step_homes.py` calls for each layer. After a planned step, `lasting_homes.py` decides which layers
may move. Experts move to the homes in `parallel/homes`.
"""
