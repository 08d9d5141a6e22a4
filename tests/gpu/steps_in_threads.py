"""Steps of the executor on ranks that are threads: the model is spread as `from_pretrained` spreads it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from relibra.parallel import balance_live, execute_plan, logical_parameters, register, relocate
from relibra.parallel.agreement import Agreement
from tests.gpu.threaded_ranks import run_threads
from tests.parallel.ranks_at_work import Case, num_targets, run_batch, step_of_model
from tests.parallel.trainings import SETTINGS
from tests.parallel.wraps import wrapped
from tests.replay.tiny_models import tiny_model

_ONE_BY_ONE = threading.Lock()
"""Held while random weights are drawn: seeds are global."""

READS_BACK = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")
"""Operations whose result, or its size, the host waits for on an accelerator."""


def spread(case: Case) -> nn.Module:
    """Return the model of this rank.

    `from_pretrained` takes the accelerator of the machine, reads a file and patches global functions meanwhile, which
    threads may not do at once. This distributes a model that is there, by the same functions of transformers.
    """
    ranks = case.num_ranks
    if case.device == "cuda":
        torch.cuda.init()  # else a mesh warns in the first test of a process
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation=case.implementation)
    dense = init_device_mesh(case.device, (1, 1, ranks, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    experts = init_device_mesh(case.device, (1, 1, 1, ranks), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))
    with _ONE_BY_ONE:
        model = tiny_model(case.family, **case.model).to(case.device, getattr(torch, case.dtype)).train()
    model = model.maybe_distribute_model(model, config, TransformersDeviceMesh(dense, experts))
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return wrapped(model, case.wrap)


def on_threads(case: Case, work: Callable[[nn.Module, Case], Any] = step_of_model) -> list[Any]:
    """Return what `work(model, case)` finds on each rank."""
    register()
    with mock.patch.object(Agreement, "reach", _agree_unwatched):
        return run_threads(lambda _: work(spread(case), case), case.num_ranks)


def _agree_unwatched(*args: Any, **settings: Any) -> Any:
    """Agreements read numbers on the CPU; one comes before a backward pass that is watched for what it reads."""
    with _disable_current_modes():
        return _REACH(*args, **settings)


_REACH = Agreement.reach


def live_step(model: nn.Module, case: Case) -> dict:
    """Do this rank's share of a step, balanced live with the slots of the plan."""
    with balance_live(model, slots=case.plan.slots, sums=case.sums) as live:
        found = step_of_model(model, replace(case, follow_plan=False))
    return found | {"skew": tuple(live.skew()), "copies": live.num_copies}


def train(model: nn.Module, case: Case) -> dict:
    """Train with one plan after another, homes moving in between; return losses and all weights in logical order."""
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    scale, losses = case.num_ranks / num_targets(case), []
    for number in range(case.num_steps):
        plan = case.plans[number % len(case.plans)]
        relocate(model, plan.physical_to_logical_map, optimizer)
        with execute_plan(model, plan, case.demand, sums=case.sums) as step:
            done = [
                run_batch(model, replace(case, plan=plan), m, dist.get_rank(), scale, step)[1]
                for m in range(len(plan.replica_MLRB))
            ]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(done) / num_targets(case))
    return {"losses": losses, "weights": {name: weight.cpu().clone() for name, weight in logical_parameters(model)}}


def step_without_reading_back(model: nn.Module, case: Case) -> dict:
    """Do a step twice; in the second one nothing between the first and the last layer of a micro-batch is read back.

    On a GPU torch raises where the host would wait for the device; on a CPU an operation of `READS_BACK` raises.
    Before the first layer transformers looks at the positions, to make its mask.
    """
    rank, known = dist.get_rank(), case.known_routes(range(len(case.plan.replica_MLRB)), dist.get_rank())
    layers = model.model.layers
    for attempt in range(2):
        refusal = _refusal(case.device) if attempt else nullcontext()
        handles = [
            layers[0].register_forward_pre_hook(lambda *_, one=refusal: one.__enter__() and None),
            layers[-1].register_forward_hook(lambda *_, one=refusal: one.__exit__(None, None, None)),
        ]
        with execute_plan(model, case.plan, case.demand, routes=known) as step:
            for m in known:
                _, tokens_BN, mask_BN = case.batch(m, rank)
                with step.micro_batch(m, known[m]):
                    logits = model(tokens_BN, use_cache=False).logits
                    loss = (logits.float() * mask_BN.unsqueeze(-1)).sum()
                    with refusal:
                        loss.backward()
        for handle in handles:
            handle.remove()
    return {"ran_at_home": step.ran_at_home}


def _refusal(device: str) -> AbstractContextManager[object]:
    """Return a context, to be entered again and again, in which reading back raises."""
    return _NoWaiting() if device == "cuda" else _NoReading()


class _NoWaiting:
    """torch's own check. All threads of a process have one, so all ranks are inside or outside."""

    def __enter__(self) -> None:
        dist.barrier()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        torch.cuda.set_sync_debug_mode("default")


def reads_back(function: Any, args: Any) -> bool:
    """Return whether the host waits for the result of an operation, or for its size, on an accelerator."""
    name = function.overloadpacket.__name__
    masks = name in ("index", "index_put", "index_put_") and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    return masks or name in READS_BACK or str(function) == "aten.repeat_interleave.Tensor"


class _NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_back(function, args):
            raise RuntimeError(f"{function} reads back between the layers of a micro-batch")
        return function(*args, **(kwargs or {}))
