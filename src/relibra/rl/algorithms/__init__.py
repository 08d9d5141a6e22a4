"""Algorithms: a file each, with its settings and its loss; advantages, the value loss, mismatch of trainer and sampler.

In: tensors. Out: tensors. Start with `ppo.py`, of which the other losses are variations, and `loss.py`, which calls the
loss of a run: one of these, or a function of the user. The files of algorithms import no torch, as `config` reads them.
"""
