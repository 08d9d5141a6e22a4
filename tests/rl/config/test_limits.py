"""Every number among the settings has limits: outside of them it is refused by name, at once, whatever else is set."""

import math
import time
import typing

import annotated_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import ConfigError
from relibra.rl.config.run_config import RunConfig, load_config

SECONDS = 1.0
"""Longest check of a configuration; a loop up to a setting takes minutes."""


def _kinds(annotation):
    return [kind for kind in (typing.get_args(annotation) or (annotation,)) if kind is not type(None)]


def fields():
    """Return every setting as (section, name, annotation, metadata)."""
    return [
        (section, name, field.annotation, field.metadata)
        for section, model in RunConfig.model_fields.items()
        for name, field in model.annotation.model_fields.items()
    ]


NUMBERS = {
    f"{section}.{name}": (_kinds(annotation)[0], metadata)
    for section, name, annotation, metadata in fields()
    if _kinds(annotation)[0] in (int, float)
}


def limits(key):
    """Return the smallest and the largest value of a setting, as pydantic holds them; None: there is none."""
    found = {}
    for one in NUMBERS[key][1]:
        for kind, end in (("ge", "low"), ("gt", "low"), ("le", "high"), ("lt", "high")):
            if isinstance(one, getattr(annotated_types, kind.capitalize())):
                found[end] = getattr(one, kind)
    return found.get("low"), found.get("high")


def test_the_schema_was_read():
    assert len(NUMBERS) > 50
    assert limits("rollout.window") == (0, 1 << 20)


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_two_limits(key):
    low, high = limits(key)
    assert low is not None, f"{key} has no smallest value"
    assert high is not None, f"{key} has no largest value"
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert low < high <= 1 << 53


def check(overrides):
    """Load a configuration; return the message of a refusal, or None. Never anything else, and never slow."""
    began = time.perf_counter()
    try:
        load_config(None, [f"{key}={value}" for key, value in overrides.items()])
        said = None
    except ConfigError as error:
        said = str(error)
        assert "\n" not in said
    assert time.perf_counter() - began < SECONDS, overrides
    return said


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_outside_of_its_limits_is_refused_by_name(key):
    low, high = limits(key)
    step = 1 if NUMBERS[key][0] is int else 1e-9
    for value in (low - step - abs(low) * 1e-9, high * 2 + step, 10**18, -(10**18), 2**200, 1e300, -1e300):
        kind = NUMBERS[key][0]
        said = check({key: kind(value)})
        assert said is not None
        assert key in said


values = st.one_of(
    st.integers(-3, 200),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2**20, 2**20 - 1, 1_048_573, 2**24, 2**31 - 1, 2**31, 2**53, 0.5, 1e-300, 1e9]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["true", "[]", "{}", "[[1]]", "''", "tppo", "nan", "x" * 300, "1979-05-27", "\x1b[31m", "\ud800"]),
)
at_limits = st.sampled_from(sorted(NUMBERS)).flatmap(
    lambda key: st.tuples(st.just(key), st.sampled_from(limits(key)) | values)
)
anything = st.tuples(st.sampled_from([f"{section}.{name}" for section, name, _, _ in fields()]), values)


@settings(max_examples=200)
@given(st.lists(at_limits | anything, max_size=6).map(dict), st.sampled_from(["dapo", "tppo", "ppo"]))
def test_any_settings_together_are_read_or_refused_at_once(overrides, preset):
    check({"algorithm.preset": preset, **overrides})
