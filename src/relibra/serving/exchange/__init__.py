"""M2N exchange: rows of M attention workers to N expert workers and back (MegaScale-Infer, section 5).

In: a row per token and worker in a buffer that is made once, with the token's choices of that worker's experts and
their gates. Out: the weighted sum of those experts, same place. Open `messages.py` first, then `addressing.py`,
`attention_side.py` and `expert_side.py`.
"""
