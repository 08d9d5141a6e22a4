"""Expert parameters at home: the rows a rank stores, their relocation, and their logical order.

Start with `relocation.py`.
"""
