"""Plug-in of slime, miles and vime: samples go into micro-batches, and on ranks, so that loads of experts are even.

Ray calls `install` in every process of a job whose runtime environment says
`"worker_process_setup_hook": "relibra.integrations.slime.install"` (docs/guides/trainers.md). These trainers make the
schedule of a rollout in one function, `build_dp_schedule`, in the process that holds all samples with their routes. The
installed one calls it, and then exchanges samples of its result: `repack_partitions`. Where routes are missing, or no
schedule can help, the result is returned as it is; the log says why, once for each reason.

Read: slime 624b824 (2026-08-21), miles 31f1ca9 (2026-08-21), vime 2b83ea2 (with `vime.data.batch_builder`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import EngineError, RelibraError, TraceError, in_a_line
from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.hooks import WarnOnce, check_parameters, noting_calls, wrap_function
from relibra.integrations.repacking import RepackedStep, TrainerSchedule, count_samples, of_used_layers, repack_step

Partitions = list[list[int]]
MicroBatches = list[list[list[int]]]

_log = logging.getLogger("relibra.slime")
_SCHEDULE = ("args", "train_parallel_config", "total_lengths", "global_batch_size", "rollout_indices")
_READ = "the versions that docs/guides/trainers.md names"

_routes: list[Sequence[Any] | None] = []
"""Routes of the samples of the rollout that is scheduled next."""


class _Source(NamedTuple):
    """The function that sees the routes of a rollout before it is scheduled.

    function     of a module or of a class in it
    importer     module that imports `build_dp_schedule` by name
    parameters   of the function
    argument     parameter with the routes; "data" holds them as its entry `rollout_routed_experts`
    """

    module: str
    function: str
    parameters: Sequence[str]
    argument: str
    importer: str


_SOURCES = {
    "slime": _Source(
        "slime.observability.rollout_data_utils",
        "validate_rollout_routed_experts_for_replay",
        ("routed_experts", "args"),
        "routed_experts",
        "slime.ray.rollout",
    ),
    "miles": _Source(
        "miles.ray.rollout.train_data_conversion",
        "split_train_data_by_dp_scheduled_raw",
        ("args", "data", "train_parallel_config"),
        "data",
        "miles.ray.rollout.train_data_conversion",
    ),
    "vime": _Source(
        "vime.data.batch_builder", "BatchBuilder.split_by_dp", ("self", "data"), "data", "vime.data.batch_builder"
    ),
}


def install() -> None:
    """Make slime, miles or vime, whichever is installed, schedule by recorded routes; a second call changes nothing.

    raises    EngineError where none is installed, or its functions are not those that were read
    """
    found = {name: source for name, source in _SOURCES.items() if importlib.util.find_spec(name) is not None}
    if not found:
        raise EngineError(
            "relibra.integrations.slime.install found none of slime, miles and vime in this process: the hook belongs "
            "into the runtime environment of their jobs"
        )
    for name, source in found.items():
        schedule = _import(f"{name}.utils.dp_schedule")
        check_parameters(schedule, "build_dp_schedule", _SCHEDULE, _READ)
        module = _import(source.module)
        owner_name, _, function = source.function.rpartition(".")
        owner = getattr(module, owner_name) if owner_name else module
        check_parameters(owner, function, source.parameters, _READ)
        wrap_function(schedule, "build_dp_schedule", _planned, also=source.importer)
        wrap_function(owner, function, noting_calls(functools.partial(_note_routes, source)), also=source.importer)


def _import(name: str) -> ModuleType:
    """Return a module of a trainer; raises EngineError where this version of it has none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise EngineError(f"this {name.partition('.')[0]} has no {name}: relibra was written for {_READ}") from error


def _note_routes(source: _Source, call: Mapping[str, Any]) -> None:
    given = call[source.argument]
    if source.argument == "data":
        given = given.get("rollout_routed_experts") if isinstance(given, Mapping) else None
    _routes[:] = [given]


def _planned(stock: Callable[..., Any]) -> Callable[..., Any]:
    unplanned = WarnOnce(_log, "the schedule of the trainer is used as it is")

    @functools.wraps(stock)
    def build_dp_schedule(
        args: Any, train_parallel_config: dict[str, Any], total_lengths: list[int], **options: Any
    ) -> tuple[Partitions, MicroBatches, list[int], list[int]]:
        routes = _routes.pop() if _routes else None
        given, ranks = stock(args, train_parallel_config, total_lengths, **options), train_parallel_config
        partitions, micro_batches, num_micro_batches, rollouts = given
        try:
            if routes is None:
                raise TraceError("the samples have no routes: start with --use-rollout-routing-replay")
            layout = ExpertLayout.of_megatron(args, data_ranks=ranks["dp_size"])
            partitions, micro_batches, step = repack_partitions(
                partitions,
                micro_batches,
                num_micro_batches,
                routes=routes,
                total_lengths=total_lengths,
                layout=layout,
                rank_tokens=int(args.max_tokens_per_gpu * ranks["cp_size"]) if args.use_dynamic_batch_size else None,
            )
        except RelibraError as error:
            unplanned.warn(str(error))
            return given
        _log.info(step.line("rollout"))
        return partitions, micro_batches, num_micro_batches, rollouts

    return build_dp_schedule


def repack_partitions(
    partitions: Partitions,
    micro_batches: MicroBatches,
    num_micro_batches: Sequence[int],
    *,
    routes: Sequence[Any],
    total_lengths: Sequence[int],
    layout: ExpertLayout,
    rank_tokens: int | None,
) -> tuple[Partitions, MicroBatches, RepackedStep]:
    """Return partitions and micro-batches with samples exchanged until loads of expert-parallel ranks are even.

    Samples stay in their optimizer step and in the data-parallel ranks that share experts; every rank keeps its
    number of micro-batches, and none is empty.

    partitions          samples of each data-parallel rank
    micro_batches       of each rank: places in its partition
    num_micro_batches   of each optimizer step
    routes              of every sample, also of those that are left out: integers [rows, layers, choices]
    rank_tokens         most tokens of a micro-batch; None: micro-batches keep their number of samples
    raises              TraceError where routes are missing or of another model
    """
    start = time.perf_counter()
    if len(routes) != len(total_lengths):
        raise TraceError(f"{len(total_lengths)} samples are scheduled, and {len(routes)} have routes")
    sample_S, given = _schedule_of(partitions, micro_batches, num_micro_batches, layout.group_ranks)
    length_S = np.array([total_lengths[s] for s in sample_S], dtype=np.int64)
    counted = count_samples(
        _Picked(routes, sample_S), length_S, num_experts=layout.num_experts, num_ranks=layout.expert_ranks
    )
    step = repack_step(
        of_used_layers(*counted),
        length_S,
        given,
        layout,
        rank_tokens=rank_tokens,
        since=start,
        keep_counts=rank_tokens is None,
    )
    return *_partitions_of(step.schedule, sample_S), step


@dataclass(frozen=True, eq=False)
class _Picked(Sequence[Any]):
    """Routes of the scheduled samples; what vime left in a file is loaded when it is taken, and not kept."""

    routes: Sequence[Any]
    sample_S: Int64[ndarray, " S"]

    def __len__(self) -> int:
        return len(self.sample_S)

    def __getitem__(self, place: Any) -> Any:
        route = self.routes[self.sample_S[place]]
        if not hasattr(route, "load"):
            return route
        try:
            return route.load()
        except OSError as error:
            raise TraceError(
                f"the routes of sample {self.sample_S[place]} cannot be loaded: {in_a_line(error)}"
            ) from error


def _schedule_of(
    partitions: Partitions, micro_batches: MicroBatches, num_micro_batches: Sequence[int], group_ranks: int
) -> tuple[Int64[ndarray, " S"], TrainerSchedule]:
    """Return the numbers of the scheduled samples, ascending, and their schedule."""
    rows = [
        (partition[place], m, rank)
        for rank, partition in enumerate(partitions)
        for m, places in enumerate(micro_batches[rank])
        for place in places
    ]
    table_S3 = np.array(sorted(rows), dtype=np.int64).reshape(-1, 3)
    return table_S3[:, 0], TrainerSchedule(
        micro_batch_S=table_S3[:, 1].astype(np.int32),
        rank_S=table_S3[:, 2].astype(np.int32),
        step_M=np.repeat(np.arange(len(num_micro_batches)), num_micro_batches).astype(np.int32),
        num_ranks=len(partitions),
        group_ranks=group_ranks,
    )


def _partitions_of(schedule: TrainerSchedule, sample_S: Int64[ndarray, " S"]) -> tuple[Partitions, MicroBatches]:
    """Return the samples of each data-parallel rank in the order they run, and the places of each micro-batch."""
    partitions: Partitions = []
    micro_batches: MicroBatches = []
    for rank in range(schedule.num_ranks):
        own = np.flatnonzero(schedule.rank_S == rank)
        own = own[np.argsort(schedule.micro_batch_S[own], kind="stable")]
        counts = np.bincount(schedule.micro_batch_S[own], minlength=len(schedule.step_M))
        partitions.append(sample_S[own].tolist())
        micro_batches.append([part.tolist() for part in np.split(np.arange(len(own)), np.cumsum(counts)[:-1])])
    return partitions, micro_batches
