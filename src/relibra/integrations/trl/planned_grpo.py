"""`PlannedGRPO`: a mixin that lets TRL's `GRPOTrainer` replay routes and follow a plan of each generation batch.

Each method is a hook of TRL, in the order of a step:

_generate_and_score_completions   TRL samples and scores; routes are recorded, or taken from the engine
_prepare_inputs                   TRL cuts the batch into micro-batches; the routes are planned, experts move
compute_loss                      routes are replayed, experts run where the plan says
training_step                     encloses the backward pass; the plan rests while the optimizer steps
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relibra.cluster import Cluster
from relibra.errors import EngineError
from relibra.integrations.shared_failures import on_all_ranks
from relibra.integrations.trl.generation_batches import (
    EngineRoutes,
    mini_batches,
    read_engine_routes,
    record_routes,
    schedule_samples,
)
from relibra.integrations.trl.plan_runner import PlanRunner
from relibra.parallel import register
from relibra.planning.budget import Budget
from relibra.replay import BatchRoutes, RoutingReplay, record_routing, replay_routing
from relibra.replay.replay import RouterComparison
from relibra.routing.demand import Demand
from relibra.routing.trace import RoutingTrace

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object  # users name the mixin before a trainer class in the bases of their class

SAMPLES = "relibra_samples"
"""Entry of TRL's batches: which samples of the generation batch they hold. TRL shuffles and splits it as the others."""

_HOOKS = {
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "compute_loss": ("model", "inputs"),
    "save_model": ("output_dir", "_internal_call"),
    "_save_checkpoint": ("model", "trial"),
    "_prepare_inputs": ("generation_batch",),
    "_generate_and_score_completions": ("inputs",),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
}
_STATE = ("_buffered_inputs", "_step", "_metrics", "num_iterations", "mask_truncated_completions", "use_vllm")
_ADVICE = "install the TRL that it was written for, 1.16: pip install -e '.[train,trl]' in the checkout"


class PlannedGRPO(_Trainer):  # type: ignore[misc]
    """Mixin for TRL's GRPOTrainer, or a subclass of it: `class Planned(PlannedGRPO, GRPOTrainer)`.

    cluster         the machine that plans are made for: a `Cluster` of as many ranks as share the experts, or the name
                    of a preset. None: routes are replayed, and nothing is planned
    budget          what plans may use; None: that of `relibra train`. Samples stay where TRL puts them
    balancer        makes the plans: a name that `relibra compare` lists, but for those that see earlier or live loads
    engine_routes   returns the routes of the engine that sampled, called once per generation batch on each rank, with
                    the tokens of its samples in TRL's order. None: one forward pass of the trainer records routes
    raises          EngineError for a version of TRL with other hooks, for a model that cannot replay routes, or
                    whose experts cannot follow plans, and for settings under which they go wrong

    The other arguments are those of the trainer. Metrics of each step: relibra/skew_before, relibra/skew (busiest rank
    / mean rank, static homes and planned), relibra/replicas, relibra/moved, relibra/pushed_mib, relibra/ran_at_home,
    relibra/plan_seconds, relibra/disagreement (share of tokens and layers that the router would now route otherwise).
    """

    def __init__(
        self,
        *args: Any,
        cluster: Cluster | str | None = None,
        budget: Budget | None = None,
        balancer: str = "relibra",
        engine_routes: EngineRoutes | None = None,
        **kwargs: Any,
    ) -> None:
        """Make TRL's trainer, then check that its model can do what is asked for."""
        check_hooks(type(self))
        register()
        super().__init__(*args, **kwargs)
        if missing := [name for name in _STATE if not hasattr(self, name)]:
            raise EngineError(f"{_version()}: GRPOTrainer has no attribute {missing[0]}; {_ADVICE}")
        self._policy = self.accelerator.unwrap_model(self.model)
        self._plans = None if cluster is None else PlanRunner(self._policy, cluster, budget, balancer)
        if self._plans is not None and self._plans.may_move and self.use_vllm:
            raise EngineError(
                "use_vllm: TRL sends experts to vLLM in the order in which they are stored, not in that of their ids "
                "once they have moved: plan with Budget(move_homes=False), or publish weights in a rollout_func "
                "(relibra.parallel.logical_parameters)"
            )
        if self._plans is not None and self.args.load_best_model_at_end:
            raise EngineError(
                "load_best_model_at_end: transformers loads it with load_state_dict, which takes no whole weights for "
                "a sharded model (it ends stock runs too, in 5.23), and knows no experts that have moved: set it to "
                "False, and load trainer.state.best_model_checkpoint with from_pretrained after the run"
            )
        self._engine_routes = engine_routes
        self._trace: RoutingTrace | None = None
        self._scoring = self._gradients_wait = False
        self._around_step = ExitStack()
        self._replay: RoutingReplay | None = None
        self._compared = RouterComparison()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self._plans is not None:
            self._plans.close()
        self._trace, self._scoring = None, True
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._scoring = False
        input_ids_BN, mask_BN = _whole_sequences(output)
        if self._trace is None:
            self._trace = self._routes_now(input_ids_BN, mask_BN)
        output[SAMPLES] = torch.arange(len(input_ids_BN))
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Record the routes of the old log-probs, or replay those of the engine: the ratio compares like with like."""
        score, unwrapped = super()._get_per_token_logps_and_entropies, self.accelerator.unwrap_model(model)
        if not self._scoring or self._trace is not None or unwrapped is not self._policy:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)
        if self._engine_routes is None:
            with record_routing(self._policy) as recorder:
                scores = score(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)
                self._trace = recorder.take_trace(input_ids, attention_mask, source="TRL, the pass of old log-probs")
            return scores
        trace = self._trace = self._routes_now(input_ids, attention_mask)
        parts, rows = [], batch_size or len(input_ids)
        for start in range(0, len(input_ids), rows):
            ids, mask = input_ids[start : start + rows], attention_mask[start : start + rows]
            routes = BatchRoutes.padded(trace.select(range(start, start + len(ids))), mask, ids)
            with replay_routing(self._policy, routes):
                parts.append(score(model, ids, mask, logits_to_keep, len(ids), **options))
        return tuple(None if pieces[0] is None else torch.cat(pieces) for pieces in zip(*parts, strict=True))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._plans is not None and self._buffered_inputs is not before:
            self._plan_generation(self._plans)
        return inputs

    def _plan_generation(self, plans: PlanRunner) -> None:
        """Count the routes of all ranks in the order of training, and plan; collective."""
        assert self._trace is not None, "routes are there before the batch is cut"
        order = torch.cat([batch[SAMPLES] for batch in self._buffered_inputs]).numpy()
        counts_sLE = torch.from_numpy(Demand.from_trace(self._trace).counts_SLE[order])
        demand = schedule_samples(
            self.accelerator.gather(counts_sLE.to(self.accelerator.device)).cpu().numpy(),
            layer_ids=self._trace.layer_ids.tolist(),
            top_k=self._trace.experts_TLK.shape[2],
            world_size=self.accelerator.num_processes,
            num_ranks=plans.num_ranks,
            mini_batch_M=mini_batches(
                len(self._buffered_inputs), self.num_iterations, self.args.gradient_accumulation_steps
            ),
        )
        figures = plans.begin(demand, self._plain_optimizer(), may_move=not self._gradients_wait)
        for name, value in figures.items():
            self._log_figure(name, value)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss; in training under replay, which lasts until the end of `training_step`."""
        if self.model.training and SAMPLES in inputs:
            assert self._trace is not None, "routes are there before the batch is cut"
            input_ids_BN, mask_BN = _whole_sequences(inputs)
            routes = BatchRoutes.padded(self._trace.select(inputs[SAMPLES].tolist()), mask_BN, input_ids_BN)
            self._replay = self._around_step.enter_context(self._passes(routes))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _passes(self, routes: BatchRoutes) -> AbstractContextManager[RoutingReplay | None]:
        """Return the context of the passes of the current micro-batch."""
        if self._plans is None:
            return replay_routing(self._policy, routes)
        micro_batches = len(self._buffered_inputs)
        group = self.accelerator.process_index // self._plans.num_ranks
        return self._plans.micro_batch(group * micro_batches + self._step % micro_batches, routes)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss of a micro-batch; forward, backward and recomputation follow the plan."""
        try:
            with ExitStack() as self._around_step:
                loss = super().training_step(*args, **kwargs)
        except BaseException as error:
            if self._plans is not None:
                self._plans.close(error)
            raise
        if self._replay is not None:
            self._compared, self._replay = self._compared + self._replay.comparison(), None
        self._gradients_wait = not self.accelerator.sync_gradients
        if not self._gradients_wait:
            self._end_mini_batch()
        return loss

    def _end_mini_batch(self) -> None:
        """End the execution of the plan before the optimizer steps, and log what happened; collective."""
        sent = 0
        if self._plans is not None:
            executed = self._plans.finish()
            sent = executed.pushed_bytes
            self._log_figure("ran_at_home", executed.ran_at_home)
        own = torch.tensor([[self._compared.differing_pairs, self._compared.pairs, sent]], dtype=torch.int64)
        differing, pairs, sent = self.accelerator.gather(own.to(self.accelerator.device)).sum(0).tolist()
        self._log_figure("disagreement", differing / max(1, pairs))
        if self._plans is not None:
            self._log_figure("pushed_mib", sent / 2**20)
        self._compared = RouterComparison()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as TRL does, with experts in logical order; collective."""
        with self._logical_order():
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._logical_order():
            super()._save_checkpoint(model, trial)

    def _logical_order(self) -> AbstractContextManager[None]:
        return nullcontext() if self._plans is None else self._plans.logical_order(self._plain_optimizer())

    def _routes_now(self, input_ids_BN: Tensor, mask_BN: Tensor) -> RoutingTrace:
        """Return the routes of the engine, or those that the trainer's model takes now; collective."""
        if self._engine_routes is None:
            with self.accelerator.autocast():
                return record_routes(self._policy, input_ids_BN, mask_BN, self.args.per_device_train_batch_size)
        cut, engine = bool(self.mask_truncated_completions), self._engine_routes
        return on_all_ranks(
            lambda: read_engine_routes(engine, self._policy, input_ids_BN, mask_BN, cut=cut),
            "get the routes of its samples (engine_routes)",
            device=self.accelerator.device,
        )

    def _plain_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer that accelerate has wrapped; None before training."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _log_figure(self, name: str, value: float) -> None:
        self._metrics["train"][f"relibra/{name}"].append(float(value))


def _whole_sequences(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask as TRL feeds them to the model: prompts padded left, completions right."""
    input_ids_BN = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return input_ids_BN, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def check_hooks(planned: type) -> None:
    """Raise EngineError if the trainer that a class extends by `PlannedGRPO` lacks a method or parameter of TRL."""
    for name, wanted in _HOOKS.items():
        method = getattr(super(PlannedGRPO, planned), name, None)
        if method is None:
            raise EngineError(
                f"{planned.__name__} has no {name} behind PlannedGRPO, in {_version()}: write class "
                f"{planned.__name__}(PlannedGRPO, GRPOTrainer); {_ADVICE}"
            )
        found = tuple(inspect.signature(method).parameters)[1:]
        if found[: len(wanted)] != wanted:
            raise EngineError(f"{_version()}: {name} takes {found}, and relibra needs {wanted}; {_ADVICE}")


def _version() -> str:
    return f"TRL {metadata.version('trl')}"
