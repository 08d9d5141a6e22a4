"""Homes: the expert parameters that a rank stores, their relocation, and their logical order.

In: a model and a map of homes. Out: moved experts, or parameters in logical order. Start with `relocation.py`.
"""
