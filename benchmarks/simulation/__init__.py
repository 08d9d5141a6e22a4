"""The simulator: speed, agreement with this machine, windows of a rollout."""
