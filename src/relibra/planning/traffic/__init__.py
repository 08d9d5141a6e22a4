"""Traffic of a plan: token split, rows and bytes on every link.

In: a plan and its scheduled demand. Out: arrays of rows or bytes. Start with `split.py`; `rank_tables.py` has
what one rank needs to execute a layer.
"""
