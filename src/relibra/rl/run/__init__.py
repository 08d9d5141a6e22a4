"""A run as processes and files. In: `RunConfig`. Out: a run folder with metrics, checkpoints and the policy.

Start with `launch.py` (starts processes, here or `on_ray/`) and `worker.py` (one process); `run_folder.py` lists the
files of a run.
"""
