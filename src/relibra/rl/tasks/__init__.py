"""Tasks: prompts, and rewards that a program can check. In: `TaskSettings`, a file. Out: `Prompt`s and rewards.

Start with `task.py`, the interface; `prompts.py` is the task of your own file.
"""
