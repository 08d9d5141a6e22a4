"""The ranks of a run on the nodes of a Ray cluster. In: `RunConfig`, run folder. Out: `EndedRanks`.

Start with `driver.py` (the process of the user). `layout.py` decides how many ranks a node gets, `placing.py` reserves
room. `node_ranks.py` is the actor of a node with ranks, `node_server.py` that of a rollout server, which
`ray_servers.py` watches. `node_actors.py` and `connection.py` are what they share. ray is imported only when it is
used.
"""
