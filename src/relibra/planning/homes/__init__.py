"""Homes: which rank owns each expert during a step.

In: loads per micro-batch, layer and expert. Out: `home_LE`. Start with `home_search.py`.
"""
