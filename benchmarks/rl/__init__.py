"""RL training runs, timed."""
