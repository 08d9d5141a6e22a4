"""A run as processes and files: launch, ranks, run folder, checkpoints, display, evaluation.

Start with `launch.py`.
"""
