"""Settings for every test: property tests draw the same cases each time, and no clock ends them."""

import gc

import jaxtyping
from hypothesis import settings

from tests.shape_checks import build_once

settings.register_profile("relibra", deadline=None, derandomize=True)
settings.load_profile("relibra")

jaxtyping.jaxtyped = build_once

gc.disable()


def pytest_collection_finish() -> None:
    """Leave what modules made out of later collections, which take seconds of every process otherwise."""
    gc.freeze()
    gc.enable()
