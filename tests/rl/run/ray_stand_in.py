"""Stands for the package ray, as far as a run uses it: tasks are processes, nodes are numbers of CPUs.

It shows what the driver does with answers of tasks, and nothing about Ray itself.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for_futures
from concurrent.futures.process import BrokenProcessPool
from types import ModuleType, SimpleNamespace
from typing import Any


class RayError(Exception): ...


class RayTaskError(RayError): ...


class GetTimeoutError(RayError): ...


class WorkerCrashedError(RayError): ...


class Cluster:
    """Nodes with so many CPUs each."""

    def __init__(self, *cpus_of_nodes: int) -> None:
        self.alive = {f"{number:08d}": float(cpus) for number, cpus in enumerate(cpus_of_nodes)}
        self.groups: list[list[str]] = []

    def modules(self) -> dict[str, ModuleType]:
        """Return ray and its modules, by name."""
        ray, util, strategies = (ModuleType(name) for name in ("ray", "ray.util", "ray.util.scheduling_strategies"))
        ray.exceptions = SimpleNamespace(**{kind.__name__: kind for kind in (RayError, *RayError.__subclasses__())})
        ray.is_initialized = lambda: True
        ray.nodes = lambda: [
            {"Alive": True, "NodeID": name, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": cpus}}
            for name, cpus in self.alive.items()
        ]
        ray.remote, ray.wait, ray.get = _remote, _wait, _get
        ray.cancel = lambda future, **_: future.pool.shutdown(wait=False, cancel_futures=True)
        util.placement_group, util.remove_placement_group = self._reserve, self.groups.remove
        util.placement_group_table = lambda group: {"bundles_to_node_id": dict(enumerate(group))}
        strategies.PlacementGroupSchedulingStrategy = lambda group, **_: group
        return {module.__name__: module for module in (ray, util, strategies)}

    def _reserve(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        assert strategy == "STRICT_SPREAD"
        room = [name for name, cpus in self.alive.items() if cpus >= bundles[0]["CPU"]]
        group = _Group(room[: len(bundles)])
        self.groups.append(group)
        return group


class _Group(list):
    def wait(self, _seconds: float) -> bool:
        return True


def _remote(**options: Any) -> Any:
    assert options["max_retries"] == 0

    def task(function: Any) -> Any:
        def start(*words: Any) -> Future:
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            future = pool.submit(function, *words)
            future.pool = pool
            return future

        return SimpleNamespace(remote=start)

    return task


def _wait(futures: list[Future], num_returns: int, timeout: float) -> tuple[list[Future], list[Future]]:
    assert num_returns == 1
    ready, _ = wait_for_futures(futures, timeout, "FIRST_COMPLETED")
    return list(ready)[:1], [one for one in futures if one not in list(ready)[:1]]


def _get(future: Future, timeout: float | None = None) -> Any:
    try:
        return future.result(timeout)
    except TimeoutError as error:
        raise GetTimeoutError(str(error)) from error
    except BrokenProcessPool as error:
        raise WorkerCrashedError(str(error)) from error
    except Exception as error:
        raise RayTaskError(str(error)) from error
