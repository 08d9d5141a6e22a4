"""A run as processes and files. In: `RunConfig`. Out: a run folder with metrics, checkpoints and the policy.

Start with `launch.py`; `node_ranks.py` starts the ranks of a machine, `ray_nodes.py` places them on several,
`rank.py` is one of them; `run_folder.py` lists the files of a run.
"""
