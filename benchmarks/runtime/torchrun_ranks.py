"""The ranks that torchrun started, of which this process is one: one process for each device, or each core."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from relibra.errors import ConfigError

BACKENDS = ("gloo", "nccl")
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class TorchrunRanks:
    """This process among those of torchrun.

    per_node   ranks of a node
    """

    backend: str
    rank: int
    num_ranks: int
    local_rank: int
    per_node: int

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cuda", self.local_rank) if self.backend == "nccl" else torch.device("cpu")

    @property
    def name(self) -> str:
        """What the maker calls the device, and how many ranks there are."""
        name = torch.cuda.get_device_name(self.device) if self.backend == "nccl" else "CPU"
        return f"{self.num_ranks} ranks, {self.backend}, {name}"

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Make the default process group inside."""
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)  # before anything allocates: else every rank would use the first GPU
        device_id = self.device if self.backend == "nccl" else None
        dist.init_process_group(self.backend, timeout=TIMEOUT, device_id=device_id)
        try:
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()

    @contextmanager
    def folder_of_node(self) -> Iterator[Path]:
        """Return a new folder that all ranks of a node see; collective."""
        with tempfile.TemporaryDirectory() if self.local_rank == 0 else nullcontext("") as own:
            names = self.gather(own)
            yield Path(names[self.rank - self.local_rank])
            dist.barrier()  # nobody reads in it any more

    def gather(self, own: object) -> list:
        """Return what each rank has, as JSON; collective."""
        text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(self.device)
        sizes_R = [size.item() for size in _all_gather(torch.tensor([len(text)], device=self.device))]
        padded = torch.cat([text, text.new_zeros(max(sizes_R) - len(text))])
        texts = zip(_all_gather(padded), sizes_R, strict=True)
        return [json.loads(bytes(one[:size].tolist())) for one, size in texts]


def _all_gather(own: Tensor) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found


def torchrun_ranks(backend: str) -> TorchrunRanks | None:
    """Return this process among those of torchrun; None: torchrun did not start it.

    raises   ConfigError where the backend has no ranks or no device
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if backend == "nccl":
            raise ConfigError(
                "--backend nccl needs one process for each GPU: start them with "
                "`torchrun --nproc-per-node GPUS -m benchmarks runtime --backend nccl` in the checkout"
            )
        return None
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if backend == "nccl" and torch.cuda.device_count() <= local_rank:
        raise ConfigError(
            f"--backend nccl: rank {rank} would use GPU {local_rank} of its node, where torch sees "
            f"{torch.cuda.device_count()} CUDA devices: start as many processes as there are, or pass --backend gloo"
        )
    if backend == "gloo" and torch.cuda.is_available():
        raise ConfigError("--backend gloo is for CPUs, and torch sees a GPU: set CUDA_VISIBLE_DEVICES= to hide it")
    if num_ranks < 2:
        raise ConfigError("torchrun started 1 process: expert parallelism needs two or more (--nproc-per-node)")
    return TorchrunRanks(backend=backend, rank=rank, num_ranks=num_ranks, local_rank=local_rank, per_node=per_node)
