"""Responses as flat arrays: exchanged between ranks, and in files of a checkpoint; never pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray
from safetensors.numpy import load, save

from relibra.errors import EngineError, TraceError
from relibra.rl.batch.schedule import cut_into_runs
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import thread_group
from relibra.routing.tensor_files import TensorFormat, read_tensors, write_tensors

_FACTS = ("sample_id", "group_id", "prompt_length", "windows", "window_length")
_TOKENS = {"tokens_T": "tokens_n", "log_probs_X": "log_probs_r", "versions_X": "versions_r", "values_X": "values_r"}
"""Arrays and the fields of a response that lie end to end in them."""
FIELDS: Mapping[str, type[np.generic]] = {
    **dict.fromkeys((*(f"{name}_S" for name in _FACTS), "length_S", "finish_reason_S", "rewarded_S"), np.int64),
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
MAX_EXCHANGE_BYTES = 16 << 30
"""Most bytes that one rank receives in a step."""
ROUND_BYTES = 64 << 20
"""Most bytes that one rank sends or receives in one collective; some libraries keep their sizes in 32 bits."""


def save_responses(path: Path, responses: Sequence[Response]) -> None:
    """Write responses into a file, without routes, whole or not at all; the same responses give the same bytes.

    Routes are not kept: the next window feeds the prefix again, and the value model routes by itself.
    """
    write_tensors(path, _FORMAT, to_arrays(responses), {})


def load_responses(path: Path) -> list[Response]:
    """Read a file of `save_responses`; raises TraceError when it is missing, foreign, of another version or damaged."""
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
    for one in responses:
        same = len(one.tokens_n) - one.prompt_length == one.length == len(one.versions_r) == len(one.values_r)
        assert same, f"sample {one.sample_id}: its fields have different numbers of tokens"
    facts: dict[str, list[Any]] = {f"{name}_S": [getattr(one, name) for one in responses] for name in _FACTS}
    facts |= {
        "length_S": [len(one.tokens_n) for one in responses],
        "finish_reason_S": [_FINISH_REASONS.index(one.finish_reason) for one in responses],
        "rewarded_S": [one.reward is not None for one in responses],
        "reward_S": [0.0 if one.reward is None else one.reward for one in responses],
    }
    tokens = {name: [getattr(one, field) for one in responses] for name, field in _TOKENS.items()}
    return {
        **{name: np.array(values, dtype=FIELDS[name]) for name, values in facts.items()},
        **{
            name: np.concatenate([np.zeros(0, FIELDS[name]), *pieces], dtype=FIELDS[name])
            for name, pieces in tokens.items()
        },
    }


def from_arrays(arrays: Mapping[str, ndarray]) -> list[Response]:
    """Return the responses of `to_arrays`, each with memory of its own, so that one can be kept without the others."""
    facts = {name: arrays[name].tolist() for name in FIELDS if name.endswith("_S")}
    ends = {"T": np.cumsum(arrays["length_S"]), "X": np.cumsum(arrays["length_S"] - arrays["prompt_length_S"])}
    tokens: dict[str, Any] = {f: np.split(arrays[name], ends[name[-1]][:-1]) for name, f in _TOKENS.items()}
    return [
        Response(
            **{name: facts[f"{name}_S"][s] for name in _FACTS},
            **{f: pieces[s].copy() for f, pieces in tokens.items()},
            finish_reason=_FINISH_REASONS[facts["finish_reason_S"][s]],
            reward=facts["reward_S"][s] if facts["rewarded_S"][s] else None,
        )
        for s in range(len(facts["sample_id_S"]))
    ]


def exchange_responses(responses: list[Response], target_ranks: Sequence[int]) -> list[Response]:
    """Send each response to a rank, and return those that this rank receives, by sample id; collective.

    Fields arrive bit for bit. A response that stays on its rank is not copied. Others go a few at a time, so that what
    has been sent leaves memory before more arrives: routes of a step may be half of a machine's memory.

    responses      of this rank; the list is empty afterwards
    target_ranks   of the default group, one per response
    raises         EngineError, on all ranks, when one of them would receive more than MAX_EXCHANGE_BYTES
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert all(0 <= target < num_ranks for target in target_ranks), f"targets {set(target_ranks)} of {num_ranks} ranks"
    parts: list[list[Response]] = [[] for _ in range(num_ranks)]
    for response, target in zip(responses, target_ranks, strict=True):
        parts[target].append(response)
    responses.clear()
    arrived, parts[rank] = parts[rank], []
    waiting = [_cut(part, ROUND_BYTES // num_ranks) for part in parts]
    del parts  # `waiting` alone holds what is to be sent
    for _ in range(_agree_on_rounds(waiting)):
        sent = [_to_bytes(pieces.pop(0)) if pieces else b"" for pieces in waiting]
        arrived += [response for payload in _exchange_bytes(sent) if payload for response in _from_bytes(payload)]
    return sorted(arrived, key=lambda response: response.sample_id)


def bytes_to_others(responses: Sequence[Response], target_ranks: Sequence[int]) -> int:
    """Return the bytes of responses that `exchange_responses` sends to other ranks."""
    rank = dist.get_rank()
    return sum(_num_bytes(one) for one, target in zip(responses, target_ranks, strict=True) if target != rank)


def _num_bytes(response: Response) -> int:
    """Return the bytes of a response in a message."""
    routes = 0 if response.experts_mLK is None else response.experts_mLK.nbytes
    widths = {axis: sum(np.dtype(FIELDS[name]).itemsize for name in FIELDS if name[-1] == axis) for axis in "STX"}
    return 5 * 8 + widths["S"] + widths["T"] * len(response.tokens_n) + widths["X"] * response.length + routes


def _cut(responses: Sequence[Response], most_bytes: int) -> list[list[Response]]:
    """Return consecutive pieces of at most so many bytes, or of one larger response."""
    return [[responses[s] for s in run] for run in cut_into_runs([_num_bytes(one) for one in responses], most_bytes)]


def _agree_on_rounds(waiting: Sequence[Sequence[Sequence[Response]]]) -> int:
    """Return in how many rounds all ranks send their pieces (`waiting`: those for each rank); collective.

    Raises EngineError, on all ranks, when one of them would receive more than MAX_EXCHANGE_BYTES.
    """
    bytes_R = [sum(_num_bytes(one) for piece in pieces for one in piece) for pieces in waiting]
    own = torch.tensor([max(len(pieces) for pieces in waiting), *bytes_R])
    gathered = [torch.zeros_like(own) for _ in waiting]
    dist.all_gather(gathered, own, group=thread_group())
    all_RX = torch.stack(gathered)
    largest = int(all_RX[:, 1:].sum(dim=0).max())
    if largest > MAX_EXCHANGE_BYTES:
        raise EngineError(
            f"a rank would receive {largest} bytes of responses in a step: at most {MAX_EXCHANGE_BYTES} are allowed; "
            "use more ranks, fewer responses per step, or shorter ones"
        )
    return int(all_RX[:, 0].max())


def _to_bytes(responses: Sequence[Response]) -> bytes:
    """Return responses as a safetensors file in memory: the arrays of `to_arrays`, and the routes of each."""
    routes = {f"routes_{s}": one.experts_mLK for s, one in enumerate(responses) if one.experts_mLK is not None}
    return save(to_arrays(responses) | {name: np.ascontiguousarray(ids) for name, ids in routes.items()})


def _from_bytes(payload: bytearray) -> list[Response]:
    """Return the responses of a message of `_to_bytes`, each with memory of its own."""
    arrays = load(bytes(payload))
    routes = {int(name.removeprefix("routes_")): ids.copy() for name, ids in arrays.items() if name not in FIELDS}
    return [replace(one, experts_mLK=routes.get(s)) for s, one in enumerate(from_arrays(arrays))]


def _exchange_bytes(payloads: Sequence[bytearray | bytes]) -> list[bytearray]:
    """Send one payload to each rank and return what each rank sent, in rounds of bounded size; collective."""
    rank, num_ranks = dist.get_rank(), len(payloads)
    own_R = torch.tensor([len(payload) for payload in payloads])
    sizes = [torch.zeros_like(own_R) for _ in payloads]
    dist.all_gather(sizes, own_R, group=thread_group())
    bytes_RR = torch.stack(sizes)  # from, to
    received = [bytearray() for _ in payloads]
    piece = max(1, ROUND_BYTES // num_ranks)
    for start in range(0, int(bytes_RR.max()), piece):
        sent = torch.from_numpy(np.frombuffer(bytearray().join(p[start : start + piece] for p in payloads), np.uint8))
        to_R = (bytes_RR[rank] - start).clamp(0, piece).tolist()
        from_R = (bytes_RR[:, rank] - start).clamp(0, piece).tolist()
        got = torch.empty(sum(from_R), dtype=torch.uint8)
        dist.all_to_all_single(got, sent, from_R, to_R, group=thread_group())
        for buffer, part in zip(received, got.split(from_R), strict=True):
            buffer += part.numpy().data
    return received
