"""One simulated training step: stage costs, passes, pipeline schedule, timeline.

In: a plan, its demand, a cluster, a model shape. Out: `SimulatedStep`. Start with `training_step.py`.
"""
