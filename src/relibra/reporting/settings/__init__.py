"""Settings of runs on pages. In: the config.json of one run or of two. Out: sentences and sections.

`listing.py` names and compares them, `sections.py` shows them.
"""
