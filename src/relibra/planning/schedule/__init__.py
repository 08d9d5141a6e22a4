"""Schedule: micro-batch and source rank of each sample.

In: token-slots per sample. Out: `micro_batch_S`, `rank_S`. Start with `packing.py`.
"""
