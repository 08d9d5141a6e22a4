"""Calibration: measure this machine and write it as a cluster that plans are priced with.

Out: a `Cluster`. Start with `calibration.py`.
"""
