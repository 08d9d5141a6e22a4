"""Responses as flat arrays, and files of them in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.rl.rollout.response import Response
from relibra.routing.tensor_files import TensorFormat, read_tensors, write_tensors

FIELDS: Mapping[str, type[np.generic]] = {
    "sample_id_S": np.int64,
    "group_id_S": np.int64,
    "length_S": np.int64,
    "prompt_length_S": np.int64,
    "windows_S": np.int64,
    "window_length_S": np.int64,
    "finish_reason_S": np.int64,
    "rewarded_S": np.int64,
    "reward_S": np.float64,
    "tokens_T": np.int64,
    "log_probs_X": np.float32,
    "versions_X": np.int32,
    "values_X": np.float32,
}
"""Arrays of `S` responses with `T` tokens and `X` response tokens, and their types; routes are not among them."""
_FORMAT = TensorFormat(
    name="responses",
    version=2,
    noun="a file of responses",
    axes={name: name[-1] for name in FIELDS},
    dtypes=FIELDS,
    may_be_0="STX",
    error=TraceError,
)
_FINISH_REASONS: tuple[Literal["stop", "length"] | None, ...] = (None, "stop", "length")


def save_responses(path: Path, responses: Sequence[Response]) -> None:
    """Write responses into a file, without routes, whole or not at all; the same responses give the same bytes.

    Routes are not kept: the next window feeds the prefix again, and the value model routes by itself.
    """
    write_tensors(path, _FORMAT, to_arrays(responses), {})


def load_responses(path: Path) -> list[Response]:
    """Read a file of `save_responses`.

    raises    TraceError when the file is missing, foreign, of another version or damaged
    """
    arrays, _ = read_tensors(path, _FORMAT)
    lengths = {"T": arrays["length_S"], "X": arrays["length_S"] - arrays["prompt_length_S"]}
    for axis, name in (("T", "tokens_T"), ("X", "log_probs_X")):
        if lengths[axis].min(initial=0) < 0 or lengths[axis].sum() != len(arrays[name]):
            raise TraceError(f"{path}: {name} has {len(arrays[name])} entries, which does not fit its responses")
    if not np.isin(arrays["finish_reason_S"], range(len(_FINISH_REASONS))).all():
        raise TraceError(f"{path} holds a finish reason other than 0 to {len(_FINISH_REASONS) - 1}")
    return from_arrays(arrays)


def to_arrays(responses: Sequence[Response]) -> dict[str, ndarray]:
    """Return the fields of responses, without routes, end to end."""
    facts = {
        "sample_id_S": [one.sample_id for one in responses],
        "group_id_S": [one.group_id for one in responses],
        "length_S": [len(one.tokens_n) for one in responses],
        "prompt_length_S": [one.prompt_length for one in responses],
        "windows_S": [one.windows for one in responses],
        "window_length_S": [one.window_length for one in responses],
        "finish_reason_S": [_FINISH_REASONS.index(one.finish_reason) for one in responses],
        "rewarded_S": [one.reward is not None for one in responses],
        "reward_S": [0.0 if one.reward is None else one.reward for one in responses],
    }
    flat = {
        "tokens_T": [one.tokens_n for one in responses],
        "log_probs_X": [one.log_probs_r for one in responses],
        "versions_X": [one.versions_r for one in responses],
        "values_X": [one.values_r for one in responses],
    }
    for one in responses:
        same = len(one.tokens_n) - one.prompt_length == one.length == len(one.versions_r) == len(one.values_r)
        assert same, f"sample {one.sample_id}: its fields have different numbers of tokens"
    return {
        **{name: np.array(values, dtype=FIELDS[name]) for name, values in facts.items()},
        **{
            name: np.concatenate([np.zeros(0, FIELDS[name]), *pieces], dtype=FIELDS[name])
            for name, pieces in flat.items()
        },
    }


def from_arrays(arrays: Mapping[str, ndarray]) -> list[Response]:
    """Return the responses of `to_arrays`, each with memory of its own, so that one can be kept without the others."""
    facts = {name: arrays[name].tolist() for name in FIELDS if name.endswith("_S")}
    stops_n, stops_r = np.cumsum(arrays["length_S"]), np.cumsum(arrays["length_S"] - arrays["prompt_length_S"])
    tokens, log_probs, versions, values = (
        np.split(arrays[name], stops[:-1])
        for name, stops in (
            ("tokens_T", stops_n),
            ("log_probs_X", stops_r),
            ("versions_X", stops_r),
            ("values_X", stops_r),
        )
    )
    return [
        Response(
            sample_id=sample_id,
            group_id=facts["group_id_S"][s],
            tokens_n=tokens[s].copy(),
            prompt_length=facts["prompt_length_S"][s],
            log_probs_r=log_probs[s].copy(),
            versions_r=versions[s].copy(),
            values_r=values[s].copy(),
            windows=facts["windows_S"][s],
            window_length=facts["window_length_S"][s],
            finish_reason=_FINISH_REASONS[facts["finish_reason_S"][s]],
            reward=facts["reward_S"][s] if facts["rewarded_S"][s] else None,
        )
        for s, sample_id in enumerate(facts["sample_id_S"])
    ]
