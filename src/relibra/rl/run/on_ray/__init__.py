"""The ranks of a run on the nodes of a Ray cluster. In: `RunConfig`, run folder. Out: `EndedRanks`.

Start with `driver.py` (the process of the user); `layout.py` decides how many ranks a node gets, `node_ranks.py` is the
actor of a node. Only `driver.py` imports ray, and only when it is used.
"""
