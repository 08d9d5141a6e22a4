"""Files of responses: nothing changes on the way, and nothing damaged is read."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.response_arrays import from_arrays, load_responses, save_responses, to_arrays
from tests.rl.made_up import random_response, same

RESPONSES = st.lists(
    st.builds(random_response, st.integers(0, 1 << 50), st.integers(0, 1000), dtype=st.none()), max_size=6
)


def all_same(some, others):
    return len(some) == len(others) and all(same(one, other) for one, other in zip(some, others, strict=True))


@given(RESPONSES)
def test_every_field_comes_back_bit_for_bit(responses):
    back = from_arrays(to_arrays(responses))
    assert all_same(responses, back)
    for response in back:
        assert response.tokens_n.flags.writeable
        assert response.tokens_n.base is None, "each response has memory of its own"


def test_new_responses_and_odd_numbers_survive(tmp_path):
    odd = random_response(0, 0, dtype=None)
    odd.values_r[:] = -0.0
    responses = [new_response(5, 2, [1, 2, 3]), odd, random_response(1, 1, dtype=None)]
    save_responses(tmp_path / "file", responses)
    assert all_same(responses, load_responses(tmp_path / "file"))
    save_responses(tmp_path / "none", [])
    assert load_responses(tmp_path / "none") == []


def test_file_is_written_whole_without_routes_with_equal_bytes(tmp_path):
    responses = [random_response(s, 3) for s in range(5)]
    save_responses(tmp_path / "one", responses)
    save_responses(tmp_path / "two", responses)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    without = [replace(response, experts_mLK=None) for response in responses]
    assert all_same(without, load_responses(tmp_path / "one"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@settings(max_examples=60)
@given(st.data())
def test_a_changed_byte_is_noticed_or_means_nothing(tmp_path_factory, data):
    responses = [random_response(s, 9, dtype=None, longest=6) for s in range(3)]
    path = tmp_path_factory.mktemp("changed") / "file"
    save_responses(path, responses)
    message = bytearray(path.read_bytes())
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(message)
    with suppress(TraceError):
        assert all_same(responses, load_responses(path))


def test_a_file_of_the_version_before_is_refused_in_one_sentence(tmp_path):
    from safetensors.numpy import save_file

    header = '{"format": "responses", "version": 1, "checksum": "0"}'
    save_file({"facts_SF": np.zeros((0, 11), np.int64)}, tmp_path / "old", metadata={"relibra": header})
    with pytest.raises(TraceError, match="old has format version 1: this relibra reads version 2") as caught:
        load_responses(tmp_path / "old")
    assert "\n" not in str(caught.value)
