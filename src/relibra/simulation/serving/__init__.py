"""Simulated serving of a deployment plan.

served_shape    sizes of a model of the simulator, as a deployment search takes them
"""
