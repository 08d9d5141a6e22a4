"""Replicas: slots, the transfers that fill them, and the host pool.

Start with `replica_slots.py`.
"""
