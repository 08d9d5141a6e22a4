"""The cost model: seconds, rows and bytes of a step under a plan, for the planner's objective and for the simulator.

In: a plan, its scheduled demand, a cluster, an expert shape. Out: arrays per micro-batch, layer and rank, and
`Prediction`, their sum over the step. Start with `prediction.py`.
"""
