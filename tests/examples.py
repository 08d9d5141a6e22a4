"""Property tests with few examples in quick runs and many in slow ones."""

import pytest


def few_and_many(few, many):
    """Run a test with `examples` few, and slow with many: the settings of the property inside of it."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


def quick_and_slow(argument, quick, slow):
    """Parametrize a test: some values run always, the others with the slow tests only."""
    several = not isinstance(argument, str)
    marked = [pytest.param(*(value if several else [value]), marks=pytest.mark.slow) for value in slow]
    return pytest.mark.parametrize(argument, [*quick, *marked])
