"""Analysis of plans: bounds, gain of each lever, plans in words, comparison of balancers, fault coverage.

In: plans and demands. Out: numbers and sentences. Start with `comparison.py`.
"""
