"""Checkpoints of a run: in, the models, optimizers and unfinished responses of a step; out, folders to resume from.

Start with `checkpoint.py`, which says what is in one; `checkpoint_writer.py` writes them while training goes on.
"""
