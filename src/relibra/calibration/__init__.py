"""Calibration: measure this machine and describe it as a cluster that plans are priced with.

In: the shape of one expert and a number of ranks. Out: a `Cluster`. Start with `fit.py`, which fits it to seconds.
`measurement.py` starts one process per rank and returns the seconds; `machine.py` keeps a measurement for later runs.
"""
