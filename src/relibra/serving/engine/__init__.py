"""Engine of an attention worker: requests in, tokens with log-probs and routes out, batched continuously.

`request.py` holds the values, `sampling.py` chooses tokens, `prefill.py` feeds prompts, `running_batch.py` holds the
rows that are decoded together, `slotted_cache.py` their keys and values, `micro_batch.py` is the loop of one
micro-batch, and `engine.py` shares requests between them. It handles token ids only.
"""
