"""Training steps of tiny models: on several gloo processes that follow a plan, and dense in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from relibra.parallel import execute_plan, register
from relibra.planning.plan import StepPlan
from relibra.replay import BatchRoutes, replay_routing
from relibra.routing.demand import Demand
from relibra.routing.trace import RoutingTrace
from tests.parallel.wraps import SAME_MATHS, wrapped
from tests.replay.tiny_models import random_tokens, tiny_model
from tests.spawned_ranks import run_spawned

GROUP_TIMEOUT_S, TIMEOUT_S = 60, 300


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: routes, a plan for them (or none), and how the model runs.

    num_ranks   all of them; a plan for fewer makes several expert-parallel groups, each with its own share of the
                plan's micro-batches
    in_flight   all forward passes come before the first backward pass
    plans       of a training, taken in turn
    ahead       routes of all micro-batches are known when the step begins
    wrap        what is put around the model (`wraps.py`)
    autocast    forward passes run in bfloat16
    accumulate  gradients are reduced over ranks after the last micro-batch only
    model       settings of the model's configuration
    distributed settings of DistributedConfig
    device      of the model and its batches; routes stay on the host
    """

    plan: StepPlan
    demand: Demand
    trace: RoutingTrace
    num_ranks: int
    family: str = "qwen3_moe"
    implementation: str = "relibra"
    follow_plan: bool = True
    checkpointing: bool = False
    in_flight: bool = False
    sums: str = "fast"
    dtype: str = "float32"
    num_steps: int = 1
    plans: tuple[StepPlan, ...] = ()
    ahead: bool = False
    wrap: str = ""
    autocast: bool = False
    accumulate: bool = False
    model: dict[str, object] = field(default_factory=dict)
    distributed: dict[str, object] = field(default_factory=dict)
    device: str = "cpu"

    @property
    def model_name(self) -> str:
        return "-".join([self.family, *self.model])

    @property
    def groups(self) -> int:
        return self.num_ranks // self.plan.num_ranks

    def batch(self, micro_batch: int, rank: int) -> tuple[list[int], Tensor, Tensor]:
        """Return (samples, padded tokens, mask) of a rank (of its group) in a micro-batch of the plan."""
        samples = np.flatnonzero((self.plan.micro_batch_S == micro_batch) & (self.plan.rank_S == rank)).tolist()
        lengths = [int(self.trace.rows_per_sample[s]) for s in samples]
        mask = torch.zeros(max(1, len(samples)), max([1, *lengths]), dtype=torch.long)
        tokens = torch.zeros_like(mask)
        for row, (s, length) in enumerate(zip(samples, lengths, strict=True)):
            mask[row, :length] = 1
            tokens[row, :length] = random_tokens(1, length, seed=s)[0]
        return samples, tokens.to(self.device), mask.to(self.device)

    def routes(self, micro_batch: int, rank: int) -> BatchRoutes | None:
        """Return the routes of that batch."""
        samples, _, mask_BN = self.batch(micro_batch, rank)
        return BatchRoutes.padded(self.trace.select(samples), mask_BN) if samples else None

    def known_routes(self, micro_batches: Sequence[int], rank: int) -> dict[int, BatchRoutes | None]:
        """Return what is known when the step begins."""
        return {m: self.routes(m, rank) for m in micro_batches} if self.ahead else {}


def run_batch(
    model: nn.Module, case: Case, micro_batch: int, rank: int, scale: float, step=None, known=None
) -> tuple[dict, float, Callable[[], None]]:
    """Run one batch forward, and backward unless micro-batches are in flight together.

    Return logits by sample, the summed loss of its tokens, and what runs the backward pass if that is left to do.
    """
    samples, tokens_BN, mask_BN = case.batch(micro_batch, rank)
    routes = known[micro_batch] if known else case.routes(micro_batch, rank)

    def planned():
        if step:
            return step.micro_batch(micro_batch, routes)
        return replay_routing(model, routes) if routes else nullcontext()

    def backward():
        with planned():
            (loss * scale).backward()

    with planned(), torch.autocast(case.device, torch.bfloat16, enabled=case.autocast):
        attention = mask_BN if samples else torch.ones_like(mask_BN)  # a batch of padding has to attend to something
        logits = model(tokens_BN, attention_mask=attention, use_cache=False).logits
        each = -logits[:, :-1].log_softmax(-1).gather(-1, tokens_BN[:, 1:, None]).squeeze(-1)
        loss = (each * mask_BN[:, 1:]).sum() + 0 * logits.sum()
        if not case.in_flight:
            (loss * scale).backward()
    own = {s: logits[row, : int(mask_BN[row].sum())].detach() for row, s in enumerate(samples)}
    return own, float(loss.detach()), backward if case.in_flight else lambda: None


def num_targets(case: Case) -> int:
    return int((case.trace.rows_per_sample - 1).sum())


def dense_step(case: Case) -> dict:
    """The reference: all batches one after another, on a whole model in this process."""
    model = tiny_model(case.family, **case.model).train().to(case.device)
    model = wrapped(model, "" if case.wrap in SAME_MATHS else case.wrap)
    M, R = case.plan.replica_MLRB.shape[0], case.plan.num_ranks
    case, logits, losses = replace(case, in_flight=False), {}, 0.0
    for m in range(M):
        for rank in range(R):
            if case.batch(m, rank)[0]:
                own, loss, _ = run_batch(model, case, m, rank, 1 / num_targets(case))
                logits, losses = logits | own, losses + loss
    return {"logits": logits, "loss": losses, "gradients": {n: p.grad for n, p in model.named_parameters()}}


def load(case: Case, folder: Path, tp_size: int = 1) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(
        fsdp_size=case.num_ranks // tp_size // case.distributed.get("dp_replicate_size", 1),
        tp_size=tp_size,
        ep_size=case.plan.num_ranks,
        ep_implementation=case.implementation,
        **case.distributed,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder / case.model_name,
        distributed_config=config,
        dtype=getattr(torch, case.dtype),
        attn_implementation="eager",
    ).train()
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return wrapped(model, case.wrap)


def step_on_rank(case: Case, folder: Path) -> dict:
    """Do this rank's share of a step; gradients come back whole."""
    return step_of_model(load(case, folder), case)


def step_of_model(model: nn.Module, case: Case) -> dict:
    """Do the same with a model that is loaded."""
    group, rank = divmod(dist.get_rank(), case.plan.num_ranks)
    own_micro_batches = np.split(np.arange(case.plan.replica_MLRB.shape[0]), case.groups)[group].tolist()
    logits, losses, backwards, known = {}, 0.0, [], case.known_routes(own_micro_batches, rank)
    planned = partial(execute_plan, model, case.plan, case.demand, sums=case.sums, routes=known)
    with planned() if case.follow_plan else nullcontext() as step:
        for m in own_micro_batches:
            if case.accumulate:
                model.set_requires_gradient_sync(m == own_micro_batches[-1])
            own, loss, backward = run_batch(model, case, m, rank, case.num_ranks / num_targets(case), step, known)
            logits, losses = logits | own, losses + loss
            backwards.append(backward)
        for backward in backwards:
            backward()
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters()}
    return {"logits": logits, "loss": losses, "gradients": gradients}


def _whole(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient as it is on one device; those of modules that FSDP does not know are averaged here."""
    if gradient is None:
        return None
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def _work(rank: int, num_ranks: int, work, cases: dict[str, Case], folder: Path) -> None:
    torch.set_num_threads(1)
    register()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks, timeout=timeout
    )
    for name, case in cases.items():
        torch.save(work(case, folder), folder / f"{name}-{rank}.pt")
    if dist.is_initialized():  # a rank that fails on purpose leaves early
        dist.barrier()
        dist.destroy_process_group()


def on_ranks(num_ranks: int, cases: dict[str, Case], folder: Path, work=step_on_rank) -> dict[str, list[dict]]:
    """Run all cases in processes of their own; return what `work` found on each rank, by case."""
    for case in cases.values():
        tiny_model(case.family, **case.model).save_pretrained(folder / case.model_name)
    run_spawned(_work, (num_ranks, work, cases, folder), num_ranks, TIMEOUT_S)
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(num_ranks)]
        for name in cases
    }
