"""Rows: which tokens travel between ranks, in which order, their exchange, and which expert computes each.

In: plan, scheduled demand and routes. Out: rows on the ranks that compute them, results back. Counts come from the plan
alone (`planning/traffic/rank_tables.py`). Start with `row_lists.py` (which tokens), then `prepared_rows.py` (all layers
of a micro-batch), `relays.py` (between nodes), `dispatch.py` (exchange) and `sorted_rows.py` (rows by expert).
"""
