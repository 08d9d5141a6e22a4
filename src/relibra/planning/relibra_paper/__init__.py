"""ReLibra's own levers (arXiv 2605.08639, no public code): `decision.py` first.

Homes by simulated annealing over all micro-batches (`step_homes.py`, `annealing.py`, `nodes_and_ranks.py`), samples
near their experts (`locality.py`), and replicas inside the node, filled for each layer and pass.
"""
