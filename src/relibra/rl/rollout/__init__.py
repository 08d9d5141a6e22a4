"""Rollout: prompts to responses with log-probs, routes and rewards.

In: unfinished responses and the sample cursor. Out: a `Rollout`. Start with `collect.py`.
"""
