"""What ranks do with host pools; each returns findings for the test to judge."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from relibra.parallel.balanced import balanced_layers
from relibra.parallel.homes.home_shards import home_shards
from relibra.parallel.replicas import shared_memory
from relibra.parallel.replicas.host_pool import HostPool
from relibra.parallel.replicas.prefetcher import Prefetcher
from tests.parallel.ranks_at_work import load, num_targets, run_batch
from tests.parallel.refusals import message_of

SHARED_MEMORY = Path("/dev/shm")


def pools_through_training(case, folder) -> dict[str, dict]:
    """Refresh after training steps and moves of homes, on one machine and on several simulated ones."""
    world = dist.get_world_size()
    return {
        str(ranks_per_machine): _through_training(case, folder, ranks_per_machine)
        for ranks_per_machine in (None, world // 2)
    }


def _through_training(case, folder, ranks_per_machine) -> dict:
    model = load(case, folder)
    experts = [shard.parameter for layer in balanced_layers(model).values() for shard in home_shards(layer)]
    per_tensor = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    multi_tensor = torch.optim.SGD(experts, lr=1e-6, foreach=True)
    fused = torch.optim.AdamW(experts, lr=1e-6, fused=True)
    changes = {
        "training step": lambda: train(model, case, per_tensor),
        "multi-tensor step": lambda: (model.zero_grad(), train(model, case, multi_tensor)),
        "fused step": lambda: (model.zero_grad(), train(model, case, fused)),
        "one bit": lambda: change_one_bit(model),
        "moved homes": lambda: move_homes(model),
        "moved homes, then trained": lambda: train(model, case, None),
    }
    found = {"current": {}, "wrong": {}}
    with HostPool(model, ranks_per_machine=ranks_per_machine) as pool:
        found["too early"] = message_of(lambda: pool.weights(0, 0)), pool.is_current()
        pool.refresh()
        found["current"]["at first"] = (None, pool.is_current())
        found["wrong"]["at first"] = experts_that_differ(pool, model)
        for name, change in changes.items():
            change()
            before = pool.is_current()
            pool.refresh()
            found["current"][name] = (before, pool.is_current())
            found["wrong"][name] = experts_that_differ(pool, model)
        found["bytes"] = pool.num_bytes
        found["machines"] = pool.machine_R.tolist()
        found["inodes"] = sorted(inodes_mapped_by("self"))
        found["named"] = [entry.name for entry in os.scandir(SHARED_MEMORY) if entry.inode() in found["inodes"]]
        view = pool.weights(0, 0)
    found["closed"] = message_of(lambda: pool.weights(0, 0))
    found["view after close"] = bool(view[next(iter(view))].isfinite().all())
    pool.close()
    del view
    found["inodes afterwards"] = sorted(inodes_mapped_by("self"))
    return found


def train(model: nn.Module, case, optimizer: torch.optim.Optimizer | None) -> None:
    """Run all batches of this rank, without a plan; without an optimizer the weights stay."""
    group, rank = divmod(dist.get_rank(), case.plan.num_ranks)
    for m in np.split(np.arange(case.plan.replica_MLRB.shape[0]), case.groups)[group].tolist():
        run_batch(model, case, m, rank, case.num_ranks / num_targets(case))
    if optimizer is not None:
        optimizer.step()


def change_one_bit(model: nn.Module) -> None:
    """Change the last bit of one number of one expert, past autograd and its version counters."""
    shard = home_shards(next(iter(balanced_layers(model).values())))[0]
    if len(shard.rows):
        shard.rows.data.view(torch.int32).view(-1)[3] ^= 1


def move_homes(model: nn.Module) -> None:
    """Reverse the homes of the second layer and rotate those of the third; collective."""
    for position, layer in enumerate(balanced_layers(model).values()):
        old_E = layer.physical_to_logical_E
        new_E = (old_E, old_E[::-1].copy(), np.roll(old_E, 3))[position]
        for shard in home_shards(layer):
            logical_E = shard.parameter.full_tensor().detach()[np.argsort(old_E)]
            shard.rows.copy_(logical_E[new_E[shard.first : shard.first + len(shard.rows)]])
        layer.physical_to_logical_E = new_E


def experts_that_differ(pool: HostPool, model: nn.Module) -> list[tuple[int, int, str]]:
    """Compare every expert in the pool with its home, bit by bit; collective."""
    differing = []
    for position, layer in enumerate(balanced_layers(model).values()):
        for shard in home_shards(layer):
            whole = shard.parameter.full_tensor().detach()
            for place, expert in enumerate(layer.physical_to_logical_E.tolist()):
                weight = pool.weights(position, expert)[shard.name]
                if weight.dtype != whole.dtype or not torch.equal(weight, whole[place]):
                    differing.append((position, expert, shard.name))
    return differing


def inodes_mapped_by(process: int | str) -> set[int]:
    """Nameless files in shared memory that a process has mapped; none where it is gone, or somebody else's."""
    try:
        text = Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return set()
    return {int(inode) for inode in re.findall(rf" (\d+) +{SHARED_MEMORY}/#\d+ \(deleted\)", text)}


def use_a_pool(case, folder) -> dict:
    """Read, copy, and ask for what is not there."""
    model = load(case, folder)
    rank = dist.get_rank()
    found = {"uneven machines": message_of(lambda: HostPool(model, ranks_per_machine=3))}
    with replaced(shared_memory, "free_bytes", lambda: 1000):
        found["little memory"] = message_of(lambda: HostPool(model))
    with replaced(os, "posix_fallocate", _no_room if rank == 1 else os.posix_fallocate):
        found["memory gone"] = message_of(lambda: HostPool(model))
    with replaced(shared_memory, "open_memory", lambda _: -1):
        found["out of reach"] = message_of(lambda: HostPool(model))
    found["inodes of failures"] = sorted(inodes_mapped_by("self"))

    pool = HostPool(model)
    pool.refresh()
    weights = pool.weights(1, 5)
    slots = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    narrow = {name: torch.zeros(weight.shape, dtype=torch.bfloat16) for name, weight in weights.items()}
    pool.copy_to(1, 5, slots)
    pool.copy_to(1, 5, narrow)
    found["copied"] = all(torch.equal(slots[name], weights[name]) for name in weights)
    found["cast"] = all(torch.equal(narrow[name], weights[name].to(torch.bfloat16)) for name in weights)
    found["no copy"] = [weight.data_ptr() for weight in weights.values()] == [
        weight.data_ptr() for weight in pool.weights(1, 5).values()
    ]
    found["written to"] = [_refuses_writing(weight) for weight in weights.values()]
    found["no such layer"] = message_of(lambda: pool.weights(3, 0))
    found["no such expert"] = message_of(lambda: pool.weights(0, 8))
    found["other names"] = message_of(lambda: pool.copy_to(0, 0, {"gate": torch.zeros(1)}))
    layer = next(iter(balanced_layers(model).values()))
    if rank == 1:
        layer.physical_to_logical_E = np.roll(layer.physical_to_logical_E, 2)
    found["current"] = pool.is_current()
    found["homes in dispute"] = message_of(pool.refresh)
    return found


def _no_room(*_: object) -> None:
    """Fail as the system does when somebody else has taken the memory after the first look."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refuses_writing(tensor: Tensor) -> bool:
    try:
        tensor.zero_()
    except RuntimeError:
        return True
    return False


@contextmanager
def replaced(owner: object, name: str, value: object):
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def die_with_a_pool(case, folder) -> None:
    """Rank 1 is killed while it uses the pool; the others wait for it, and would wait for long."""
    pool = HostPool(load(case, folder))
    pool.refresh()
    (folder / f"inode-{dist.get_rank()}").write_text(str(inodes_mapped_by("self").pop()))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    pool.refresh()


def prefetch(case, folder) -> dict:
    """Copy experts while this thread computes, and ask for what cannot be."""
    pool = HostPool(load(case, folder))
    pool.refresh()
    found = {"overlap": _overlap(pool), "queue": _bounded_queue(pool), "closed": _close_before_the_end(pool)}
    prefetcher = Prefetcher(pool)
    prefetcher.start("wrong", [(0, 99, slots_of(pool))])
    prefetcher.start("right", [(0, 7, slots_of(pool))])
    found["wrong"] = [message_of(lambda: prefetcher.wait("wrong", 10)) for _ in range(2)]
    found["right"] = message_of(lambda: prefetcher.wait("right", 10))
    found["unknown"] = message_of(lambda: prefetcher.wait("unknown", 10))
    found["threads"] = [len(prefetch_threads())]
    del prefetcher
    gc.collect()  # an error that was raised holds on to where it was
    found["threads"].append(len(prefetch_threads()))
    left_behind = Prefetcher(pool)  # ends with the process, in the middle of its copies
    left_behind.start("never waited for", [(0, e, slots_of(pool)) for _ in range(1000) for e in range(8)])
    globals()["_left_behind"] = left_behind
    return found


def slots_of(pool: HostPool) -> dict[str, Tensor]:
    return {name: torch.zeros_like(weight) for name, weight in pool.weights(0, 0).items()}


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "relibra-prefetch"]


class _Held:
    """Makes the copies of a pool wait for a word."""

    def __init__(self, pool: HostPool) -> None:
        self.go, self.threads, self._copy = threading.Event(), set(), pool.copy_to

    def __call__(self, *args) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(30)
        self._copy(*args)


def _overlap(pool: HostPool) -> dict:
    held = _Held(pool)
    wanted = [(layer, expert) for layer in range(3) for expert in (1, 6)]
    prefetcher = Prefetcher(pool)
    for _ in range(2):  # the key comes again
        held.go.clear()
        slots = [slots_of(pool) for _ in wanted]
        with replaced(pool, "copy_to", held):
            prefetcher.start(("layer", 2), [(*place, out) for place, out in zip(wanted, slots, strict=True)])
            product = torch.ones(64, 64) @ torch.ones(64, 64)  # computed while no copy is complete
            untouched = all(not tensor.any() for out in slots for tensor in out.values())
            late = message_of(lambda: prefetcher.wait(("layer", 2), 0.05))
            again = message_of(lambda: prefetcher.start(("layer", 2), []))
            held.go.set()
            prefetcher.wait(("layer", 2), 30)
            prefetcher.wait(("layer", 2), 0)
    right = all(
        torch.equal(out[name], weight)
        for place, out in zip(wanted, slots, strict=True)
        for name, weight in pool.weights(*place).items()
    )
    prefetcher.close()
    prefetcher.close()
    return {
        "right": right and untouched and bool((product == 64).all()),
        "threads": held.threads,
        "late": late,
        "again": again,
        "after close": message_of(lambda: prefetcher.start("more", [])),
    }


def _bounded_queue(pool: HostPool) -> list[bool]:
    """The thread holds one, the queue one, and the third has to wait for room."""
    held = _Held(pool)
    with replaced(pool, "copy_to", held):
        prefetcher = Prefetcher(pool, depth=1)
        prefetcher.start(0, [(0, 0, slots_of(pool))])
        while not held.threads:
            time.sleep(0.001)
        prefetcher.start(1, [(0, 1, slots_of(pool))])
        third = threading.Thread(target=prefetcher.start, args=(2, [(0, 2, slots_of(pool))]))
        third.start()
        third.join(0.1)
        waited = third.is_alive()
        held.go.set()
        third.join(30)
        prefetcher.wait(2, 30)
        prefetcher.close()
    return [waited, third.is_alive()]


def _close_before_the_end(pool: HostPool) -> list:
    held = _Held(pool)
    with replaced(pool, "copy_to", held):
        prefetcher = Prefetcher(pool)
        prefetcher.start("begun", [(0, 0, slots_of(pool)), (0, 1, slots_of(pool))])
        prefetcher.start("behind", [(0, 2, slots_of(pool))])
        while not held.threads:
            time.sleep(0.001)
        threading.Timer(0.1, held.go.set).start()
        prefetcher.close()
    messages = [message_of(lambda key=key: prefetcher.wait(key, 0)) for key in ("begun", "behind")]
    return [*messages, len(prefetch_threads())]
