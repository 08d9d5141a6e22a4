"""Calibration: measure this machine and describe it as a cluster that plans are priced with.

In: the shape of one expert and a number of ranks. Out: a `Cluster`. `measurement.py` starts one process per rank and
returns seconds, `fit.py` turns them into a cluster: start there. `machine.py` keeps a measurement for later runs.
"""
