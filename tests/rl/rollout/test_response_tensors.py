"""Responses as bytes: nothing changes on the way, and nothing damaged is read."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.response_tensors import from_bytes, load_responses, save_responses, to_bytes
from tests.rl.rollout.made_up import random_response, same

RESPONSES = st.lists(
    st.builds(
        random_response,
        st.integers(0, 1 << 50),
        st.integers(0, 1000),
        dtype=st.sampled_from([None, "uint8", "uint16", "int16", "int32", "int64"]),
    ),
    max_size=6,
)


@given(RESPONSES)
def test_every_field_comes_back_bit_for_bit(responses):
    data = to_bytes(responses)
    back = from_bytes(data, "a message")
    assert len(back) == len(responses)
    assert all(same(one, other) for one, other in zip(responses, back, strict=True))
    assert to_bytes(back) == data
    for response in back:
        assert response.tokens_n.flags.writeable
        assert response.tokens_n.base is None, "each response has memory of its own"


def test_fresh_responses_and_odd_numbers_survive():
    odd = random_response(0, 0)
    odd.values_r[:] = -0.0
    responses = [new_response(5, 2, [1, 2, 3]), odd, random_response(1, 1, dtype=None)]
    assert all(same(one, other) for one, other in zip(responses, from_bytes(to_bytes(responses), "it"), strict=True))
    assert from_bytes(to_bytes([]), "nothing") == []


def test_a_file_is_written_whole_and_always_the_same(tmp_path):
    responses = [random_response(s, 3) for s in range(5)]
    save_responses(tmp_path / "one", responses)
    save_responses(tmp_path / "two", responses)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    back = load_responses(tmp_path / "one")
    assert all(same(one, other) for one, other in zip(responses, back, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def read_or_refuse(message):
    try:
        return from_bytes(message, "the message")
    except TraceError as error:
        return error


@given(st.data())
def test_a_changed_byte_is_noticed_or_means_nothing(data):
    responses = [random_response(s, 9, longest=6) for s in range(3)]
    message = bytearray(to_bytes(responses))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    back = read_or_refuse(bytes(message))
    if isinstance(back, TraceError):
        assert re.match("the message[^\\n]+$", str(back))
    else:
        assert all(same(one, other) for one, other in zip(responses, back, strict=True))


@given(st.integers(0, 2000))
def test_a_cut_message_is_refused(length):
    message = to_bytes([random_response(s, 9) for s in range(3)])
    with pytest.raises(TraceError, match="the message"):
        from_bytes(message[: min(length, len(message) - 1)], "the message")


def test_files_that_are_something_else_are_refused_by_name(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(TraceError, match=r"missing cannot be read \(No such file"):
        load_responses(tmp_path / "missing")
    (tmp_path / "text").write_text("not a tensor in sight, but more than eight bytes")
    with pytest.raises(TraceError, match=r"text holds no responses, or it was cut"):
        load_responses(tmp_path / "text")
    save_file({"a": np.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(TraceError, match="foreign holds no responses: its header does not describe them"):
        load_responses(tmp_path / "foreign")
    save_file({"a": np.zeros(3)}, tmp_path / "newer", metadata={"relibra": '{"format": "responses", "version": 2}'})
    with pytest.raises(TraceError, match="newer holds no responses of version 1"):
        load_responses(tmp_path / "newer")
    save_file({"a": np.zeros(3)}, tmp_path / "other", metadata={"relibra": '{"format": "responses", "version": 1}'})
    with pytest.raises(TraceError, match=r"other holds \['a'\]: responses consist of"):
        load_responses(tmp_path / "other")
