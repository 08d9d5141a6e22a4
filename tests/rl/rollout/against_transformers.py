"""Samples of a server beside transformers: log-probs and routes."""

import numpy as np
import torch

from relibra.replay import record_routing
from relibra.rl.rollout.response import new_response


def largest_difference(model, engine, prompts, window, temperature):
    """Sample after prompts; return the largest difference of log-probs to transformers, and of routes the share."""
    responses = [new_response(index, 0, prompt) for index, prompt in enumerate(prompts)]
    windows, _ = engine.generate(responses, window=window, max_response=window)
    largest, equal, total = 0.0, 0, 0
    for prompt, one in zip(prompts, windows, strict=True):
        tokens = torch.tensor([[*prompt, *one.tokens_w.tolist()]])
        with torch.inference_mode(), record_routing(model) as recorder:
            logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        own = (logits / temperature).log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(own - one.log_probs_w).max()))
        routes = np.sort(recorder.take()[0].numpy()[: len(one.experts_mLK)], axis=2)
        pairs = (routes == np.sort(one.experts_mLK, axis=2)).all(axis=2)
        equal, total = equal + int(pairs.sum()), total + pairs.size
    return largest, equal / total
