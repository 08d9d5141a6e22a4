"""Exchange of responses between ranks, as typed arrays laid end to end; never pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray

from relibra.errors import EngineError
from relibra.rl.rollout.response import Response
from relibra.rl.rollout.response_files import FIELDS, from_arrays, to_arrays

MAX_EXCHANGE_BYTES = 16 << 30
"""Most bytes that one rank receives at once."""
ROUND_BYTES = 256 << 20
"""Most bytes that one rank sends or receives in one collective; some libraries keep their sizes in 32 bits."""

_EXPERT_TYPES = (np.uint8, np.uint16, np.int16, np.int32, np.int64)


def exchange_responses(responses: Sequence[Response], target_ranks: Sequence[int]) -> list[Response]:
    """Send each response to a rank, and return those that this rank receives, by sample id; collective.

    Fields arrive bit for bit. A response that stays on its rank is not copied.

    target_ranks   of the default group, one per response
    raises         EngineError, on all ranks, when one of them would receive more than MAX_EXCHANGE_BYTES
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert all(0 <= target < num_ranks for target in target_ranks), f"targets {set(target_ranks)} of {num_ranks} ranks"
    parts: list[list[Response]] = [[] for _ in range(num_ranks)]
    for response, target in zip(responses, target_ranks, strict=True):
        parts[target].append(response)
    sent = [_to_bytes(part) if part and target != rank else b"" for target, part in enumerate(parts)]
    received = [response for payload in _exchange_bytes(sent) if payload for response in _from_bytes(payload)]
    return sorted([*parts[rank], *received], key=lambda response: response.sample_id)


def _to_bytes(responses: Sequence[Response]) -> bytearray:
    """Lay the arrays of responses end to end: counts, fields, then shape, type and ids of the routes of each."""
    arrays = to_arrays(responses)
    routes = [np.zeros((0, 0, 0), np.uint8) if one.experts_mLK is None else one.experts_mLK for one in responses]
    shapes_S5 = np.array(
        [
            [one.experts_mLK is not None, _EXPERT_TYPES.index(ids.dtype.type), *ids.shape]
            for one, ids in zip(responses, routes, strict=True)
        ],
        dtype=np.int64,
    )
    counts = np.array([len(responses), len(arrays["tokens_T"]), len(arrays["log_probs_X"])], dtype=np.int64)
    pieces = [counts, shapes_S5, *(arrays[name] for name in FIELDS), *routes]
    return bytearray().join(np.ascontiguousarray(piece).data.cast("B") for piece in pieces if piece.size)


def _from_bytes(payload: bytearray) -> list[Response]:
    """Return the responses of a message of `_to_bytes`; their routes are views of it."""
    position = 0

    def take(count: int, dtype: type[np.generic]) -> ndarray:
        nonlocal position
        array = np.frombuffer(payload, dtype, count, position)
        position += array.nbytes
        return array

    counts = dict(zip("STX", take(3, np.int64).tolist(), strict=True))
    shapes_S5 = take(counts["S"] * 5, np.int64).reshape(-1, 5)
    arrays = {name: take(counts[name[-1]], dtype) for name, dtype in FIELDS.items()}
    responses = []
    for response, (has_routes, kind, m, L, K) in zip(from_arrays(arrays), shapes_S5.tolist(), strict=True):
        ids = take(m * L * K, _EXPERT_TYPES[kind]).reshape(m, L, K)
        responses.append(replace(response, experts_mLK=ids) if has_routes else response)
    return responses


def _exchange_bytes(payloads: Sequence[bytearray | bytes]) -> list[bytearray]:
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
    received = [bytearray() for _ in payloads]
    piece = max(1, ROUND_BYTES // num_ranks)
    for start in range(0, int(bytes_RR.max()), piece):
        sent = torch.from_numpy(np.frombuffer(bytearray().join(p[start : start + piece] for p in payloads), np.uint8))
        to_R = (bytes_RR[rank] - start).clamp(0, piece).tolist()
        from_R = (bytes_RR[:, rank] - start).clamp(0, piece).tolist()
        got = torch.empty(sum(from_R), dtype=torch.uint8)
        dist.all_to_all_single(got, sent, from_R, to_R)
        for buffer, part in zip(received, got.split(from_R), strict=True):
            buffer += part.numpy().data
    return received
