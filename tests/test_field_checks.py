from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
from pydantic import Field

from relibra import ConfigError
from relibra.field_checks import build, check_fields


@dataclass(frozen=True, kw_only=True)
class Base:
    number: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True, kw_only=True)
class Kind(Base):
    name: str
    parts: tuple[int, ...] = field(default_factory=tuple)


class Row(NamedTuple):
    name: str
    number: int = 1


class Loose(NamedTuple):
    value: Any


@pytest.mark.parametrize("kind", [Kind, Row])
def test_fields_with_a_default_may_be_missing(kind):
    check_fields(kind, {"name": "a"}, "it", ConfigError)
    with pytest.raises(ConfigError, match="it has no entry 'name'"):
        check_fields(kind, {"number": 2}, "it", ConfigError)


def test_a_dataclass_is_built_with_its_defaults():
    assert build(Kind, {"name": "a"}, "it", ConfigError) == Kind(name="a")
    assert build(Kind, {"name": "a", "parts": [1, 2]}, "it", ConfigError).parts == (1, 2)
    with pytest.raises(ConfigError, match="it: number is 0"):
        build(Kind, {"name": "a", "number": 0}, "it", ConfigError)


def test_numpy_scalars_count_and_arrays_get_a_sentence():
    check_fields(Kind, {"name": "a", "number": np.int64(3)}, "it", ConfigError)
    with pytest.raises(ConfigError, match="it: number is"):
        check_fields(Kind, {"name": "a", "number": np.arange(2)}, "it", ConfigError)
    check_fields(Loose, {"value": np.arange(2)}, "it", ConfigError)
