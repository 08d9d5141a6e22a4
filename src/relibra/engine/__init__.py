"""Sampling engine of rollouts and of the server: continuous batching over a KV cache with a slot per sequence.

In: sequences, and a forward pass of a model whose experts are local or remote. Out: one token per sequence and step.
Start with `engine.py`.
"""
