"""Rows: which tokens travel between ranks, in which order, and their exchange.

In: plan, scheduled demand and routes. Out: rows on the ranks that compute them, results back. Start with
`rank_tables.py` (counts, from the plan alone), then `row_lists.py` (which tokens) and `dispatch.py` (the exchange).
"""
