"""M2N exchange: rows of M attention workers to N expert workers and back (MegaScale-Infer, section 5).

In: rows grouped by expert in a buffer that is made once. Out: the experts' rows at the same places. Open `messages.py`
first (what is sent), then `attention_side.py` and `expert_side.py`.
"""
