"""Run a function in processes of their own, as ranks, with a time limit."""

import time

import torch.multiprocessing as mp


def run_spawned(work, args, num_ranks, seconds):
    """Run `work(rank, *args)` on ranks; raise what a rank raises, or after `seconds`. No process is left."""
    processes = mp.spawn(work, args=args, nprocs=num_ranks, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not processes.join(timeout=deadline - time.monotonic()):  # one call waits for the first to finish
            assert time.monotonic() < deadline, "the processes did not finish in time"
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
