"""Plug-in of verl: samples go into micro-batches so that loads of experts are even.

`actor_rollout_ref.model.external_lib=relibra.integrations.verl` imports this file in every worker, and the import calls
`install` (docs/guides/trainers.md). verl gives each data-parallel rank its samples, and cuts them into micro-batches in
`prepare_micro_batches`, where the routes of rollout routing replay are at hand. The installed function calls that of
verl, gathers the loads of all samples, lets rank 0 exchange samples between micro-batches of their rank, and cuts
again. Where routes are missing, or no schedule can help, verl's micro-batches are used; the log says why, once for each
reason. `old_log_probs` and `rollout_log_probs` of batches to train on are compared by `check_sampler`; the log warns of
what differs.

Read: verl 0.9.1 (2026-09-20), and main of 2026-08-22. Megatron engines only: others have no expert parallelism, or
replay no routes on it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int32, Int64
from numpy import ndarray

from relibra.errors import RelibraError, TraceError
from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.hooks import WarnOnce, check_parameters, noting_calls, wrap_function
from relibra.integrations.repacking import RepackedStep, TrainerSchedule, count_samples, of_used_layers, repack_step
from relibra.integrations.shared_failures import all_gather, on_all_ranks
from relibra.routing.sampler_check import SampledTokens, SamplerHistory, check_sampler, sampler_sums

_log = logging.getLogger("relibra.verl")
_log.setLevel(logging.INFO)  # verl shows warnings only
_MEGATRON = "verl.workers.engine.megatron.transformer_impl"
_PREPARE = (
    "data",
    "dp_group",
    "num_batches_divided_by",
    "same_micro_num_in_dp",
    "min_num_micro_batch",
    "use_dynamic_bsz_balance",
)
_FORWARD_BACKWARD = ("self", "data", "loss_function", "forward_only")
_LENGTH, _MICRO_BATCH, _LOADS = 0, 1, 2
"""Columns of a table (`own_table`): tokens, micro-batch, and from `_LOADS` on token-slots per layer and rank."""


@dataclass(frozen=True, eq=False)
class _Pass:
    """The engine that asks for micro-batches, and whether it trains."""

    engine: Any
    forward_only: bool


_current: ContextVar[_Pass | None] = ContextVar("relibra_verl_pass", default=None)
unplanned = WarnOnce(_log, "micro-batches of verl are used as they are")
unchecked = WarnOnce(_log, "log-probs of the rollout are not compared")


def install() -> None:
    """Make verl's Megatron engine cut micro-batches by recorded routes; a second call changes nothing.

    raises    EngineError where verl's functions are not those that were read
    """
    importlib.import_module("verl.workers.engine")
    megatron = sys.modules.get(_MEGATRON)
    if megatron is None:
        unplanned.warn("verl's Megatron engine cannot be imported in this process")
        return
    check_parameters(megatron, "prepare_micro_batches", _PREPARE, "verl 0.9")
    engine = getattr(megatron, "MegatronEngine", object)
    check_parameters(engine, "forward_backward_batch", _FORWARD_BACKWARD, "verl 0.9")
    if not wrap_function(megatron, "prepare_micro_batches", planned):
        return
    wrap_function(engine, "forward_backward_batch", noting_calls(_pass_of, _current))
    _log.info("relibra: micro-batches of verl's Megatron engine are cut by recorded routes")


def _pass_of(call: Mapping[str, Any]) -> _Pass:
    if getattr(call["self"].engine_config, "dynamic_context_parallel", False):
        unplanned.warn("dynamic context parallelism has a schedule of its own: it never calls prepare_micro_batches")
    return _Pass(call["self"], call["forward_only"])


def planned(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `prepare_micro_batches` with samples exchanged between the micro-batches that `stock` makes.

    Collective in the group of data-parallel ranks and in the default group.
    """

    @functools.wraps(stock)
    def prepare_micro_batches(data: Any, dp_group: Any = None, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        micro_batches, indices = stock(data, dp_group, *arguments, **options)
        current = _current.get()
        if current is not None and not current.forward_only:
            watch_sampler(data, dp_group, current.engine)
        if current is None or not _replays(current, data) or indices is None:
            return micro_batches, indices
        since = time.perf_counter()
        try:
            layout = ExpertLayout.of_megatron(
                current.engine.tf_config, data_ranks=_size(dp_group), parallel=current.engine.engine_config
            )
        except RelibraError as error:  # the same on all ranks
            unplanned.warn(str(error))
            return micro_batches, indices
        chosen = _repacked_indices(data, indices, dp_group, layout, current.forward_only, since)
        if chosen is None:
            return micro_batches, indices
        tensors = importlib.import_module("verl.utils.tensordict_utils")
        return [tensors.index_select_tensor_dict(data, item) for item in chosen], chosen

    return prepare_micro_batches


_HISTORY = "_relibra_sampler_history"
"""Attribute of an engine: the `SamplerHistory` of its batches."""


def watch_sampler(data: Any, dp_group: Any, engine: Any) -> None:
    """Compare the tokens of a batch with those of batches before, and warn of what differs; collective in the group.

    Needs actor_rollout_ref.rollout.calculate_log_probs=True and recorded routes; without them nothing is compared.
    """
    wanted = {"old_log_probs", "rollout_log_probs", "routed_experts"}
    if getattr(engine, "is_value_model", False) or not wanted <= set(data.keys()):
        return
    experts = int(engine.tf_config.num_moe_experts)
    try:
        sums = on_all_ranks(
            lambda: sampler_sums(sampled_tokens(data, num_experts=experts)),
            "read its log-probs",
            device=_device(dp_group),
            group=dp_group,
        )
    except RelibraError as error:  # the same on all ranks
        unchecked.warn(str(error))
        return
    if _size(dp_group) > 1:
        added = torch.from_numpy(sums.flat()).to(_device(dp_group))
        dist.all_reduce(added, group=dp_group)
        sums = sums.shaped(added.cpu().numpy())
    history = getattr(engine, _HISTORY, SamplerHistory())
    verdict = check_sampler(sums, history)
    if verdict.accepted:
        setattr(engine, _HISTORY, history.with_step(sums))
    elif not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning("relibra: %s", verdict.sentence)


def sampled_tokens(data: Any, *, num_experts: int) -> SampledTokens:
    """Return the response tokens of a batch to train on, with the log-probs of verl's pass and of its rollout.

    raises    TraceError where routes are missing, or padded
    """
    responses, routes, pieces = data["responses"], sample_routes(data), []
    lengths_S = (
        responses.offsets().diff() if responses.is_nested else data["attention_mask"][:, -responses.shape[1] :].sum(1)
    )
    of_tokens = zip(
        *(data[name].unbind() for name in ("old_log_probs", "rollout_log_probs", "response_mask")), strict=True
    )
    for s, (tokens, length, values) in enumerate(zip(sample_lengths(data), lengths_S.tolist(), of_tokens, strict=True)):
        old_X, rollout_X, mask_X = (one[:length].float().cpu().numpy() for one in values)
        chosen = np.flatnonzero(mask_X)
        rows = tokens - length + chosen - 1  # whose output predicts the token
        own_XLK = routes[s][rows[rows < len(routes[s])]]
        if len(own_XLK) < len(rows) or ((own_XLK < 0) | (own_XLK >= num_experts)).any():
            raise TraceError(f"sample {s} of the batch has a token without a route, or an id of no expert")
        pieces.append(((old_X - rollout_X)[chosen], np.full(len(rows), s), rows, own_XLK))
    log_ratio_X, response_X, row_X, experts_XLK = (np.concatenate(one) for one in zip(*pieces, strict=True))
    return SampledTokens(
        log_ratio_X=log_ratio_X,
        response_X=response_X,
        position_X=row_X,
        age_X=np.zeros_like(response_X),
        server_S=np.zeros(len(pieces), dtype=np.int64),
        num_servers=1,
        experts_XLK=experts_XLK,
        num_experts=num_experts,
    )


def _replays(current: _Pass, data: Any) -> bool:
    """Return whether this pass replays known routes in micro-batches of dynamic size; the same on all ranks."""
    engine = current.engine
    if getattr(engine, "is_value_model", False):
        return False  # verl replays routes in the policy; its critic routes for itself, whatever is set
    if not getattr(engine, "enable_routing_replay", False):
        if not current.forward_only:
            unplanned.warn(
                "no routes are replayed: set actor_rollout_ref.actor.megatron.router_replay.mode=R3 and "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
            )
        return False
    if not _setting(data, "use_dynamic_bsz", True):
        unplanned.warn("micro-batches have a fixed number of samples: set actor_rollout_ref.actor.use_dynamic_bsz=True")
        return False
    recorded_now = current.forward_only and engine.engine_config.router_replay.mode == "R2"
    return bool(_setting(data, "enable_routing_replay", False)) and not recorded_now


def _repacked_indices(
    data: Any, indices: list[list[int]], dp_group: Any, layout: ExpertLayout, forward_only: bool, since: float
) -> list[list[int]] | None:
    """Return this rank's samples of each micro-batch; None: those of verl stay. Collective."""
    unit = int(_setting(data, "force_group_size", 1))

    def count() -> tuple[Int32[ndarray, "X Y"] | None, str]:
        try:
            return own_table(sample_routes(data), sample_lengths(data), indices, layout, unit=unit), ""
        except RelibraError as error:
            return None, str(error)

    own, reason = on_all_ranks(count, "count the loads of its samples", device=_device(None))
    tables = _gather_tables(own, dp_group)
    if not _everywhere(tables is not None) or tables is None or own is None:
        unplanned.warn(reason or "samples of another rank have no routes, or routes of other layers")
        return None
    limit = int(_setting(data, "max_token_len_per_gpu", 0)) * int(_setting(data, "sp_size", 1))

    def plan() -> Int32[ndarray, " S"]:
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                step = repack_tables(tables, layout, rank_tokens=limit, since=since)
                _log.info(step.line("log-probs" if forward_only else "update"))
                return step.schedule.micro_batch_S
            except RelibraError as error:
                unplanned.warn(str(error))
        return np.full(sum(len(table) - 1 for table in tables), -1, dtype=np.int32)

    micro_batch_S = _from_first_rank(on_all_ranks(plan, "plan the micro-batches", device=_device(None)))
    if (micro_batch_S < 0).any():
        return None
    place = 0 if dp_group is None else dist.get_rank(dp_group)
    before = sum(len(table) - 1 for table in tables[:place])
    own_S = np.repeat(micro_batch_S[before : before + len(own) - 1], unit)
    return [np.flatnonzero(own_S == m).tolist() for m in range(len(indices))]


def own_table(
    routes: Sequence[Any], length_S: Int64[ndarray, " S"], indices: list[list[int]], layout: ExpertLayout, *, unit: int
) -> Int32[ndarray, "X Y"]:
    """Return the table that other ranks need: a first row about the batch, and a row per unit of samples.

    A row is: tokens, micro-batch, and token-slots at the experts of each rank, layer by layer. The first is: 0, number
    of micro-batches, and for each layer and rank whether the layer has experts.

    routes    of each sample: integers [rows, layers, choices]
    indices   samples of each micro-batch
    unit      consecutive samples that stay in one micro-batch (verl's `force_group_size`)
    raises    TraceError where routes are missing or of another model
    """
    micro_batch_S = np.zeros(len(length_S), dtype=np.int64)
    for m, samples in enumerate(indices):
        micro_batch_S[samples] = m
    share_SLR, used_L = count_samples(routes, length_S, num_experts=layout.num_experts, num_ranks=layout.expert_ranks)
    share_uLR = share_SLR.reshape(-1, unit, *share_SLR.shape[1:]).sum(axis=1)
    table_XY = np.zeros((len(share_uLR) + 1, _LOADS + share_uLR[0].size), dtype=np.int32)
    table_XY[0, _MICRO_BATCH] = len(indices)
    table_XY[0, _LOADS:] = np.repeat(used_L, layout.expert_ranks)
    table_XY[1:, _LENGTH] = length_S.reshape(-1, unit).sum(axis=1)
    table_XY[1:, _MICRO_BATCH] = micro_batch_S[::unit]
    table_XY[1:, _LOADS:] = share_uLR.reshape(len(share_uLR), -1)
    return table_XY


def repack_tables(
    tables: Sequence[Int32[ndarray, "_ Y"]], layout: ExpertLayout, *, rank_tokens: int, since: float
) -> RepackedStep:
    """Return the step with units exchanged between micro-batches of their data-parallel rank.

    tables   of each data-parallel rank (`own_table`)
    raises   TraceError where no layer has experts, or ranks have other numbers of micro-batches
    """
    numbers = {int(table[0, _MICRO_BATCH]) for table in tables}
    if len(numbers) > 1:
        raise TraceError(f"data-parallel ranks have different numbers of micro-batches: {sorted(numbers)}")
    units = np.concatenate([table[1:] for table in tables])
    given = TrainerSchedule(
        micro_batch_S=units[:, _MICRO_BATCH].copy(),
        rank_S=np.repeat(np.arange(len(tables)), [len(table) - 1 for table in tables]).astype(np.int32),
        step_M=np.zeros(max(numbers), dtype=np.int32),
        num_ranks=len(tables),
        group_ranks=layout.group_ranks,
    )
    used_L = np.logical_or.reduce([table[0, _LOADS :: layout.expert_ranks] > 0 for table in tables])
    share_SLR = units[:, _LOADS:].reshape(len(units), len(used_L), layout.expert_ranks).astype(np.int64)
    return repack_step(
        of_used_layers(share_SLR, used_L),
        units[:, _LENGTH].astype(np.int64),
        given,
        layout,
        rank_tokens=rank_tokens,
        since=since,
        keep_ranks=True,
    )


def sample_lengths(data: Any) -> Int64[ndarray, " S"]:
    """Return the tokens of each sample of a batch."""
    ids = data["input_ids"]
    lengths = ids.offsets().diff() if ids.is_nested else data["attention_mask"].sum(dim=1)
    return lengths.cpu().numpy().astype(np.int64)


def sample_routes(data: Any) -> list[ndarray]:
    """Return the routes of each sample of a batch; raises TraceError where it has none, or padded ones."""
    if "routed_experts" not in data:
        raise TraceError("the batch has no routed_experts: the engine returned no routes")
    routes = data["routed_experts"]
    if not routes.is_nested:
        raise TraceError("routed_experts are padded: rollout routing replay of verl 0.9 has one row per token")
    return [item.cpu().numpy() for item in routes.unbind()]


def _gather_tables(own: Int32[ndarray, "X Y"] | None, group: Any) -> list[Int32[ndarray, "_ Y"]] | None:
    """Return the tables of all data-parallel ranks; None where one has none, or they differ in columns. Collective."""
    if group is None or _size(group) == 1:
        return None if own is None else [own]
    device = _device(group)
    shape = torch.tensor([0, 0] if own is None else own.shape, dtype=torch.int64, device=device)
    shape_R2 = torch.stack(all_gather(shape, group)).cpu().numpy()
    if (shape_R2 == 0).any() or len(set(shape_R2[:, 1].tolist())) > 1 or own is None:
        return None
    padded = torch.zeros(tuple(shape_R2.max(axis=0).tolist()), dtype=torch.int32, device=device)
    padded[: len(own)] = torch.from_numpy(own).to(device)
    tables = all_gather(padded, group)
    return [table[:rows].cpu().numpy() for table, rows in zip(tables, shape_R2[:, 0].tolist(), strict=True)]


def _everywhere(true_here: bool) -> bool:
    """Return whether something is true on all ranks of the model. Collective."""
    if not dist.is_initialized():
        return true_here
    flag = torch.tensor([int(true_here)], device=_device(None))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _from_first_rank(array: Int32[ndarray, " S"]) -> Int32[ndarray, " S"]:
    """Return the array of rank 0: ranks of one model must cut alike, whatever their processors round. Collective."""
    if not dist.is_initialized():
        return array
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(_device(None))
    dist.broadcast(tensor, src=0)
    return tensor.cpu().numpy()


def _device(group: Any) -> str:
    """Return where tensors of a collective have to be."""
    if not dist.is_initialized() or dist.get_backend(group) == "gloo":
        return "cpu"
    return str(importlib.import_module("verl.utils.device").get_device_name())


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _setting(data: Any, key: str, default: Any) -> Any:
    """Return a value of a batch that is no tensor."""
    return importlib.import_module("verl.utils.tensordict_utils").get_non_tensor_data(
        data=data, key=key, default=default
    )


if "verl" in sys.modules:
    install()
