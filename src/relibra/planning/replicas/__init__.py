"""Replicas: which experts get a temporary copy on which rank, and how many token-slots it takes over.

In: loads and homes. Out: `replica_MLRB`, `quota_MLRB`. Start with `replication.py`.
"""
