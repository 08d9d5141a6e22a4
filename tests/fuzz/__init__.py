"""Mutated inputs for every reader. Start with `test_fuzz.py`; `cases.py` has the readers, `mutations.py` the damage."""
