"""Responses as bytes: from rank to rank, and into files of a checkpoint. Safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from relibra.errors import EngineError, TraceError
from relibra.files import atomic_path
from relibra.rl.rollout.response import Response

MAX_EXCHANGE_BYTES = 16 << 30
"""Most bytes that one rank receives at once."""
ROUND_BYTES = 256 << 20
"""Most bytes that one rank sends or receives in one collective; their sizes are 32-bit numbers in places."""

_KEY, _FORMAT, _VERSION = "relibra", "responses", 1
_MAX_HEADER_BYTES = 1 << 16
_FACTS = (
    "sample_id",
    "group_id",
    "tokens",
    "prompt_length",
    "windows",
    "window_length",
    "finish_reason",
    "rewarded",
    "layers",
    "choices",
    "expert_type",
)
"""Columns of `facts_SF`, a row per response."""
_FINISH_REASONS: tuple[Literal["stop", "length"] | None, ...] = (None, "stop", "length")
_EXPERT_TYPES = (
    None,
    np.dtype(np.uint8),
    np.dtype(np.uint16),
    np.dtype(np.int16),
    np.dtype(np.int32),
    np.dtype(np.int64),
)
_DTYPES: dict[str, type[np.generic]] = {
    "facts_SF": np.int64,
    "rewards_S": np.float64,
    "tokens_X": np.int64,
    "log_probs_X": np.float32,
    "versions_X": np.int32,
    "values_X": np.float32,
    "experts_bytes": np.uint8,
}


def exchange_responses(responses: Sequence[Response], target_ranks: Sequence[int]) -> list[Response]:
    """Send each response to a rank, and return those that this rank is sent, by sample id; collective.

    Fields arrive bit for bit. A response that stays where it is, is not copied.

    target_ranks   of the default group, one per response
    raises         EngineError, on all ranks, when one of them would receive more than MAX_EXCHANGE_BYTES
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert all(0 <= target < num_ranks for target in target_ranks), f"targets {set(target_ranks)} of {num_ranks} ranks"
    parts: list[list[Response]] = [[] for _ in range(num_ranks)]
    for response, target in zip(responses, target_ranks, strict=True):
        parts[target].append(response)
    payloads = [to_bytes(part) if part and target != rank else b"" for target, part in enumerate(parts)]
    arrived = list(parts[rank])
    for source, payload in enumerate(_exchange_bytes(payloads)):
        if payload:
            arrived += from_bytes(payload, f"what rank {source} sent")
    return sorted(arrived, key=lambda response: response.sample_id)


def save_responses(path: Path, responses: Sequence[Response]) -> None:
    """Write responses into a file, whole or not at all; the same responses give the same bytes."""
    data = to_bytes(responses)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def load_responses(path: Path) -> list[Response]:
    """Read what `save_responses` wrote.

    raises    TraceError when the file is missing, foreign, of another version or damaged
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}): expected responses of a checkpoint") from error
    return from_bytes(data, str(path))


def to_bytes(responses: Sequence[Response]) -> bytes:
    """Return responses as one safetensors message with a checksum over its content."""
    facts = [_facts_of(response) for response in responses]
    routes = [one.experts_nLK for one in responses if one.experts_nLK is not None]
    tensors = {
        "facts_SF": np.array(facts, dtype=np.int64).reshape(-1, len(_FACTS)),
        "rewards_S": np.array([0.0 if one.reward is None else one.reward for one in responses], dtype=np.float64),
        "tokens_X": _end_to_end([one.tokens_n for one in responses], np.int64),
        "log_probs_X": _end_to_end([one.log_probs_r for one in responses], np.float32),
        "versions_X": _end_to_end([one.versions_r for one in responses], np.int32),
        "values_X": _end_to_end([one.values_r for one in responses], np.float32),
        "experts_bytes": _end_to_end([np.ascontiguousarray(ids).view(np.uint8).ravel() for ids in routes], np.uint8),
    }
    header = {"format": _FORMAT, "version": _VERSION, "checksum": _checksum(tensors)}
    return save(tensors, metadata={_KEY: json.dumps(header)})


def from_bytes(data: bytes, source: str) -> list[Response]:
    """Read what `to_bytes` made.

    source    what errors call it
    raises    TraceError when it is foreign, of another version or damaged; a byte that changes anywhere is noticed
    """
    header = _header(data, source)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise TraceError(f"{source} cannot be read as safetensors: {error}") from error
    found = {name: array.dtype for name, array in tensors.items()}
    if found != {name: np.dtype(dtype) for name, dtype in _DTYPES.items()}:
        raise TraceError(f"{source} holds {sorted(found)}: responses consist of {sorted(_DTYPES)}, of other types")
    if header.get("checksum") != _checksum(tensors):
        raise TraceError(f"{source} is damaged: its checksum does not match its content; take an earlier copy")
    return _rebuilt(tensors, source)


def _facts_of(response: Response) -> list[int]:
    """Return the numbers of a response in the order of `_FACTS`."""
    r, n = response.length, len(response.tokens_n)
    same = n - response.prompt_length == r == len(response.versions_r) == len(response.values_r)
    assert same, f"sample {response.sample_id}: its fields have different numbers of tokens"
    _, layers, choices = (0, 0, 0) if response.experts_nLK is None else response.experts_nLK.shape
    assert response.experts_nLK is None or len(response.experts_nLK) == n, (
        f"sample {response.sample_id}: rows of routes"
    )
    return [
        response.sample_id,
        response.group_id,
        n,
        response.prompt_length,
        response.windows,
        response.window_length,
        _FINISH_REASONS.index(response.finish_reason),
        int(response.reward is not None),
        layers,
        choices,
        _EXPERT_TYPES.index(None if response.experts_nLK is None else response.experts_nLK.dtype),
    ]


def _rebuilt(tensors: Mapping[str, ndarray], source: str) -> list[Response]:
    """Cut the arrays into responses, each with memory of its own, so that one can be kept without the others."""
    facts_SF = tensors["facts_SF"]
    if facts_SF.ndim != 2 or facts_SF.shape[1] != len(_FACTS) or tensors["rewards_S"].shape != facts_SF.shape[:1]:
        raise TraceError(f"{source} describes responses in a table of {facts_SF.shape}: expected {len(_FACTS)} columns")
    facts = [dict(zip(_FACTS, row, strict=True)) for row in facts_SF.tolist()]
    tokens = [fact["tokens"] for fact in facts]
    added = [fact["tokens"] - fact["prompt_length"] for fact in facts]
    types = [_EXPERT_TYPES[fact["expert_type"]] for fact in facts]
    experts = [
        fact["tokens"] * fact["layers"] * fact["choices"] * dtype.itemsize if dtype else 0
        for fact, dtype in zip(facts, types, strict=True)
    ]
    pieces = {
        "tokens_X": tokens,
        "log_probs_X": added,
        "versions_X": added,
        "values_X": added,
        "experts_bytes": experts,
    }
    for name, lengths in pieces.items():
        if tensors[name].shape != (sum(lengths),) or min(lengths, default=0) < 0:
            raise TraceError(f"{source}: {name} is {tensors[name].shape}, which does not fit its table of responses")
    cut = {name: np.split(tensors[name], np.cumsum(lengths)[:-1]) for name, lengths in pieces.items()}
    return [
        Response(
            sample_id=fact["sample_id"],
            group_id=fact["group_id"],
            tokens_n=cut["tokens_X"][s].copy(),
            prompt_length=fact["prompt_length"],
            log_probs_r=cut["log_probs_X"][s].copy(),
            versions_r=cut["versions_X"][s].copy(),
            values_r=cut["values_X"][s].copy(),
            experts_nLK=None
            if dtype is None
            else cut["experts_bytes"][s].copy().view(dtype).reshape(fact["tokens"], fact["layers"], fact["choices"]),
            windows=fact["windows"],
            window_length=fact["window_length"],
            finish_reason=_FINISH_REASONS[fact["finish_reason"]],
            reward=float(tensors["rewards_S"][s]) if fact["rewarded"] else None,
        )
        for s, (fact, dtype) in enumerate(zip(facts, types, strict=True))
    ]


def _header(data: bytes, source: str) -> dict[str, object]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise TraceError(f"{source} holds no responses, or it was cut: {len(data)} bytes do not fit their own header")
    try:
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{source} holds no responses: its header does not describe them") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT or header.get("version") != _VERSION:
        raise TraceError(
            f"{source} holds no responses of version {_VERSION}: it says {header!r}; use the relibra that wrote it"
        )
    return header


def _checksum(tensors: Mapping[str, ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _end_to_end(arrays: Sequence[ndarray], dtype: type[np.generic]) -> ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _exchange_bytes(payloads: Sequence[bytes]) -> list[bytes]:
    """Send one payload to each rank and return what each rank sent, in rounds of bounded size; collective."""
    rank, num_ranks = dist.get_rank(), len(payloads)
    own_R = torch.tensor([len(payload) for payload in payloads])
    sizes = [torch.zeros_like(own_R) for _ in payloads]
    dist.all_gather(sizes, own_R)
    bytes_RR = torch.stack(sizes)  # from, to: every rank knows all of them, so all refuse, or none
    largest = int(bytes_RR.sum(dim=0).max())
    if largest > MAX_EXCHANGE_BYTES:
        raise EngineError(
            f"a rank would receive {largest} bytes of responses at once: at most {MAX_EXCHANGE_BYTES} are allowed; "
            "use more ranks, fewer responses per step, or shorter ones"
        )
    arrived = [bytearray() for _ in payloads]
    piece = max(1, ROUND_BYTES // num_ranks)
    for start in range(0, int(bytes_RR.max()), piece):
        sent = torch.from_numpy(np.frombuffer(bytearray().join(p[start : start + piece] for p in payloads), np.uint8))
        to_R = (bytes_RR[rank] - start).clamp(0, piece).tolist()
        from_R = (bytes_RR[:, rank] - start).clamp(0, piece).tolist()
        got = torch.empty(sum(from_R), dtype=torch.uint8)
        dist.all_to_all_single(got, sent, from_R, to_R)
        for buffer, part in zip(arrived, got.split(from_R), strict=True):
            buffer += part.numpy().data
    return [bytes(buffer) for buffer in arrived]
