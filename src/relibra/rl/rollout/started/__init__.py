"""Rollout servers that a run starts itself. In: `RunConfig`, a folder of weights. Out: an address, `StartedServers`.

Start with `own_server.py`; `commands.py` has the words of a server's command and what it reserves of a node,
`server_process.py` runs one on this machine. They import no torch, but for `own_server.py`.
"""
