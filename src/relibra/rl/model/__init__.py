"""Models of a run. In: `ModelSettings` and weights. Out: sharded policy and value model, tokenizer, optimizer.

Start with `policy.py`.
"""
