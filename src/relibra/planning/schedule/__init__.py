"""Schedule: which samples meet in a micro-batch, and from which rank each is fed.

In: token-slots per sample. Out: `micro_batch_S`, `rank_S`. Start with `packing.py`.
"""
