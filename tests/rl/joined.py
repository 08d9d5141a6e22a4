"""Work of tests in a joined group: of this process alone, or of processes of their own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.model.policy import Policy, build_policy
from relibra.rl.run.ranks import Rendezvous, connect_ranks, joined_ranks

CPU = torch.device("cpu")
VOCAB = 64
GROUP_TIMEOUT_S, TIMEOUT_S = 120.0, 900.0
TINY = (
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_experts=4",
    "rollout.prompts_per_step=8",
    "update.mini_batches=2",
    "model.dtype=float32",
    "update.activations=keep",
    "update.learning_rate=2e-4",
    "critic.pretrain_steps=0",
    "critic.min_finished=1",
    "critic.explained_variance_gate=off",
)


def tiny_config(*overrides: str, ranks: int = 1) -> RunConfig:
    return load_config(None, [*TINY, f"parallel.ranks={ranks}", *overrides])


def policy_of(config: RunConfig, folder: Path, vocab: int = VOCAB, *, samples: bool = True) -> Policy:
    """Build the policy of a configuration on the CPU; `samples` in these processes, and not in a server."""
    return build_policy(config, vocab, folder, CPU, samples=samples)


@contextmanager
def alone() -> Iterator[None]:
    """Be the only rank of a group."""
    with joined_ranks(GROUP_TIMEOUT_S, CPU, rendezvous()):
        yield


def rendezvous(rank: int = 0, num_ranks: int = 1, port: int = 0) -> Rendezvous:
    """Return where ranks of this machine meet; rank 0 listens from now on, at a free port if `port` is 0."""
    return connect_ranks(GROUP_TIMEOUT_S, f"tcp://127.0.0.1:{port}?rank={rank}&world_size={num_ranks}")


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def on_ranks(num_ranks: int, work: Callable[..., Any], folder: Path, *, expect_deaths: bool = False) -> list[Any]:
    """Run `work(folder)` on joined processes; return what each found, None of one that was killed."""
    processes = mp.spawn(_work, args=(num_ranks, free_port(), work, folder), nprocs=num_ranks, join=False)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        if expect_deaths:
            for process in processes.processes:
                process.join(deadline - time.monotonic())
                assert process.exitcode is not None, "a process hangs"
        else:
            while not processes.join(timeout=deadline - time.monotonic()):
                assert time.monotonic() < deadline, "the processes did not finish in time"
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
    files = [folder / f"found-{rank}.pt" for rank in range(num_ranks)]
    found = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    return found


def _work(rank: int, num_ranks: int, port: int, work: Callable[..., Any], folder: Path) -> None:
    torch.set_num_threads(1)
    with joined_ranks(GROUP_TIMEOUT_S, CPU, rendezvous(rank, num_ranks, port)):
        torch.save(work(folder), folder / f"found-{rank}.pt")
