"""Levers: each file one decision of a step, from arrays to arrays. `balancers/relibra.py` prices them and chooses.

`homes.py` which rank owns an expert; `resident_replicas.py` replicas that stay over micro-batches; `replication.py`
replicas of one micro-batch; `packing.py` which samples share a micro-batch.
"""
