"""Settings for every test: property tests draw the same cases each time, and no clock ends them."""

from hypothesis import settings

settings.register_profile("relibra", deadline=None, derandomize=True)
settings.load_profile("relibra")
