"""Levers: decisions of a step, from arrays to arrays. `balancers/relibra.py` prices them and chooses.

`homes.py` home ranks of experts; `resident_replicas.py` replicas that stay over micro-batches, with `instance_flow.py`,
`resident_chains.py` and `traffic_replicas.py`; `replication.py` replicas of one micro-batch; `packing.py` which samples
share a micro-batch, within `limits.py`.
"""
