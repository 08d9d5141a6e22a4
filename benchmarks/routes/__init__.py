"""Recorded routes: skew, speed of counting, writing and reading."""
