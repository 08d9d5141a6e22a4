"""Replicas: weights of hot experts on other ranks, and the way of their gradients home.

In: rank tables (`rows/`) with the pushes of a layer. Out: slots that hold the weights, gradients added to those of the
homes. Start with `push_schedule.py` (when), then `replica_gradients.py` (the autograd functions) and `residency.py`
(what stays in slots over micro-batches).
"""
