"""The one place that reads and sets environment variables, such as those of `torchrun`, caches and logs.

Also signals that stop a run, memory of the host, and imports of processes that relibra starts.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what schedulers send some time before they kill: the first one stops a run after its step."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt`. It raises both by itself while a program runs, to at most 64 and 32 MiB."""


@dataclass(frozen=True)
class LaunchedRank:
    """Who a process is among those that `torchrun`, or we, started.

    launch     name of torchrun's launch; the same after a restart
    restarts   how often torchrun has started the ranks again
    """

    rank: int
    local_rank: int
    num_ranks: int
    num_local_ranks: int
    launch: str = ""
    restarts: int = 0


def host_memory(group: Path = Path("/sys/fs/cgroup"), *, free: bool) -> float | None:
    """Return the bytes of this machine, or of its control group if that has less; None: unknown.

    free   only bytes that programs can still get, those of cached files among them
    """
    found, used = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), 0
    try:
        if free:
            rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
            found = 1024.0 * {name: int(size) for name, size, *_ in rows}["MemAvailable:"]
        if not (group / "memory.max").exists() or (limit := (group / "memory.max").read_text().strip()) == "max":
            return found
        if free:
            cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
            used = int((group / "memory.current").read_text()) - int(cached)
        return min(found, float(int(limit) - used))
    except (OSError, KeyError, ValueError):
        return None if free else found


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import inside without the garbage collector, and leave all objects made so far out of later collections.

    torch and transformers make 700,000 objects that stay: collecting them takes two fifths of start and exit time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def module_program(module: str) -> list[str]:
    """Return the command that calls `main` of a module, imported inside `uncollected_imports`."""
    own = "from relibra.environment import uncollected_imports"
    return [sys.executable, "-c", f"{own}\nwith uncollected_imports(): from {module} import main\nmain()"]


def environment_value(name: str) -> str:
    """Return an environment variable that a setting names; empty where it is not set."""
    return os.environ.get(name, "")


def server_environment(**added: str) -> dict[str, str]:
    """Return the environment of a server from another Python environment: without our path of modules."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **added}


def environment_of_dry_run() -> dict[str, str]:
    """Return the environment of a process that is rank 0 of a run without peers and without GPUs."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    own = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, "PYTHONHASHSEED": "0"}  # transformers loads missing weights in the order of a set


@contextmanager
def in_little_memory() -> Iterator[None]:
    """Let transformers read each tensor when it is used, and glibc return freed blocks of 128 KiB and more.

    Else threads read ahead, and glibc keeps freed blocks for later tensors: half a model more while it is loaded.
    """
    name, set_option = "HF_DEACTIVATE_ASYNC_LOAD", getattr(ctypes.CDLL(None), "mallopt", lambda *_: 1)
    before = os.environ.get(name)
    os.environ[name] = "1"
    set_option(_MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 32 << 20)
        set_option(_TRIM_THRESHOLD, 64 << 20)
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def ray_address() -> str:
    """Return the address of the Ray cluster to connect to; empty: the one that runs on this machine."""
    return os.environ.get("RAY_ADDRESS", "")


def first_visible_gpu() -> str | None:
    """Return what CUDA_VISIBLE_DEVICES names first, "" where it hides all GPUs; None: it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else named.partition(",")[0].strip()


def has_columns() -> bool:
    """Return whether COLUMNS gives the width of what is printed."""
    return "COLUMNS" in os.environ


def launched_rank() -> LaunchedRank | None:
    """Return this process's place among those `torchrun` started, or None when we start the processes ourselves."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    return LaunchedRank(
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        num_ranks=num_ranks,
        num_local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)),
        launch=_launch(),
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def _launch() -> str:
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return given if given != "none" else f"{socket.gethostname()} {os.getppid()}"  # torchrun stays; ranks are replaced


def error_file() -> Path | None:
    """Return where `torchrun` reads why this process failed; None: nobody asks."""
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(given) if given else None


def agent_has_store() -> bool:
    """Return whether the store of the process group is in the agent that started this rank, and not in rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def cache_folder() -> Path:
    """Return the folder of the user for files that can be made again; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relibra"


def shows_tracebacks() -> bool:
    """Return whether the user wants to see where errors come from: RELIBRA_TRACEBACK is set, and not 0."""
    return os.environ.get("RELIBRA_TRACEBACK", "0") not in ("", "0")


def hub_cache_folder() -> Path:
    """Return the folder in which the hub's library keeps downloaded models; it may not exist."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser() / "hub"


def keep_hub_offline() -> None:
    """Let the hub's library use downloaded files only, unless the user's environment says otherwise."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def keep_tokenizers_serial() -> None:
    """Let tokenizers start no threads: a fork of a process with such threads would wait for them for ever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def keep_rust_from_backtraces() -> None:
    """Let libraries in Rust end at a panic: where memory is limited, a search for symbols may take minutes."""
    os.environ["RUST_BACKTRACE"] = "0"


@contextmanager
def rank_environment(threads: int) -> Iterator[None]:
    """Set the environment of ranks that are started inside: threads of torch, logs of errors only, few cached kernels.

    With more logs, ranks print C++ stacks when another rank fails. On a CPU oneDNN keeps a kernel of 0.7 MiB for each
    shape of a product in bfloat16: 128 of them, in place of 1,024, hold what a step repeats.
    """
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def chosen_placement() -> str:
    """Return RELIBRA_EPLB: who places experts in vLLM, "on" (relibra), the path of a placement, or empty (vLLM)."""
    return os.environ.get("RELIBRA_EPLB", "")


def rank_0_environment(num_ranks: int) -> dict[str, str]:
    """Return the environment of a process that does before a run what rank 0 will do in the run."""
    who = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return {**os.environ, **who, "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker process that we start: ours, with `threads` threads of torch."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def silence_torchao() -> None:
    """Silence what torchao logs of this machine; call it before transformers, which imports torchao, is loaded."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
