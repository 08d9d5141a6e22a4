"""Models of a run: policy, critic, reference, their sharding, attention masks, tokenizer, optimizer.

Start with `policy.py`.
"""
