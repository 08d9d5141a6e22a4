"""The rollout server that a run starts itself. In: `RunConfig`, a folder of weights. Out: an address.

Start with `own_server.py`; `server_process.py` runs a server on this machine, and imports no torch.
"""
