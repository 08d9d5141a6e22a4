"""Analysis of plans: bounds, what each lever brought, plans in words, balancers side by side, fault coverage.

In: plans and demands. Out: numbers and sentences; nothing here changes a plan. Start with `comparison.py`.
"""
