"""`on_all_ranks`: work of each rank that may fail; where it fails on one, all ranks raise, and none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from relibra.errors import EngineError, RelibraError, in_a_line

T = TypeVar("T")
_BYTES = 512
"""Bytes of an error's sentence that are sent; the rest is cut."""


def on_all_ranks(
    work: Callable[[], T], what: str, *, device: torch.device | str, group: dist.ProcessGroup | None = None
) -> T:
    """Call a function that may fail on some ranks, and return its result; collective.

    what     what it does, such as "count its routes"
    device   where tensors of a collective of the group have to be
    group    None: of all ranks. Without process groups the function is only called
    raises   on all ranks, if it failed on any: there its own error, elsewhere an EngineError with the first of them
    """
    if not dist.is_initialized():
        return work()
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, no rank may be left waiting; it is raised below
        failure = error
    failed = torch.tensor([int(failure is not None)], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed.item():
        sentences = _sentences(failure, device, group)
        if failure is not None:
            raise failure
        ranks = dist.get_process_group_ranks(group)
        rank, sentence = next((rank, sentence) for rank, sentence in zip(ranks, sentences, strict=True) if sentence)
        raise EngineError(f"rank {rank} cannot {what}, and no rank goes on: {sentence}")
    return result


def _sentences(error: Exception | None, device: torch.device | str, group: dist.ProcessGroup | None) -> list[str]:
    """Return the error of each rank in a sentence, "" where it has none; collective."""
    text = "" if error is None else (str(error) if isinstance(error, RelibraError) else in_a_line(error))
    data = text.encode()[:_BYTES].ljust(_BYTES, b"\0")
    gathered = all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), group)
    return [bytes(item.cpu().numpy()).rstrip(b"\0").decode(errors="ignore") for item in gathered]


def all_gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensor of each rank, all of one shape and type; collective."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return gathered
