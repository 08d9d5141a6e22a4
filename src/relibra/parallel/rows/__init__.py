"""Rows of a micro-batch: which travel where, and their exchange.

In: a plan and routes. Out: tables, row lists, exchanged tensors. Start with `rank_tables.py`.
"""
