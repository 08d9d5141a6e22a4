"""Shared by all searches: random numbers of kernels, parallel map, deadline."""
