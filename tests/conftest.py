"""Settings for every test: property tests draw the same cases each time, and no clock ends them."""

import jaxtyping
from hypothesis import settings

from tests.shape_checks import build_once

settings.register_profile("relibra", deadline=None, derandomize=True)
settings.load_profile("relibra")

jaxtyping.jaxtyped = build_once
