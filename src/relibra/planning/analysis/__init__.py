"""Analysis of plans: bounds, the gain of each lever, a plan's decisions in a layer, what differs between two plans.

In: plans and demands. Out: numbers and sentences. Start with `explanation.py`.
"""
