"""Handles of GPU memory that a vLLM server on this machine maps (`rollout.transfer` ipc).

The only file that writes a pickle, because vLLM's "ipc" back end reads one. Nothing here reads any.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from relibra.rl.rollout.served.weight_group import Bucket
from relibra.rl.run.ranks import gather_json

_OF_GPU = 6
"""Index of the first argument of `rebuild_cuda_tensor` (`torch.multiprocessing.reductions`) that GPUs differ in."""


def gpu_handles(bucket: Bucket) -> tuple[str, list[tuple[Any, tuple[Any, ...]]]]:
    """Return the name of a GPU, and for each tensor the function by which other processes map it, and its arguments."""
    torch.cuda.ipc_collect()  # frees what servers have let go of earlier buckets
    uuid = torch.cuda.get_device_properties(bucket[0][1].device).uuid
    return str(uuid), [reduce_tensor(tensor) for _, tensor in bucket]


def gather_handles(bucket: Bucket) -> str:
    """Return what vLLM's "ipc" back end reads: for each tensor by GPU, how to map it there; base64, collective."""
    uuid, own = gpu_handles(bucket)
    texts = [
        [[base64.b64encode(v).decode()] if isinstance(v, bytes) else v for v in arguments[_OF_GPU:]]
        for _, arguments in own
    ]
    handles: list[dict[str, Any]] = [{} for _ in bucket]
    for other, listed in gather_json([uuid, texts]):
        for handle, (rebuild, arguments), of_gpu in zip(handles, own, listed, strict=True):
            decoded = (base64.b64decode(*v) if isinstance(v, list) else v for v in of_gpu)
            handle[other] = rebuild, (*arguments[:_OF_GPU], *decoded)
    return base64.b64encode(pickle.dumps(handles)).decode()
