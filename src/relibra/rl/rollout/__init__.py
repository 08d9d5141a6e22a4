"""Rollout engines: they turn prompts into responses with log-probs and routes."""
