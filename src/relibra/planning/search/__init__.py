"""Machinery that searches share: random numbers of kernels, parallel map, deadline. It decides nothing."""
