"""RL post-training with recorded routes: rollout, reward, recompute, update, weight sync."""
