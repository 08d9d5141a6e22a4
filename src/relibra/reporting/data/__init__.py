"""Numbers that pages show, read from run folders, traces and plans. No HTML.

In: files of a run, a trace or a plan. Out: frozen values. Start with `summary.py` (routes) and `metrics.py` (runs).
"""
