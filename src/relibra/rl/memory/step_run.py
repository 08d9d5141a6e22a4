"""`StepRun`: the functions of the trainer that use memory, called as a rank of a run would; all of them are here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from relibra.cluster import Cluster
from relibra.parallel import relocate
from relibra.parallel.adapters import without_adapters
from relibra.parallel.balanced import balanced_layers
from relibra.planning.activation_choice import ALL
from relibra.planning.plan import StepPlan
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.batch.training_batch import BatchExecution, TrainingBatch, executing
from relibra.rl.config.run_config import RunConfig
from relibra.rl.config.settings import LoraSettings
from relibra.rl.memory.saved_bytes import counting_saved
from relibra.rl.model.adamw_8bit import blocks_of
from relibra.rl.model.critic import value_model_class
from relibra.rl.model.host_weights import idle_while_sampling, move_to_host, on_device
from relibra.rl.model.optimizer import StepCount, make_optimizer
from relibra.rl.model.packed_sequences import use_explicit_masks, use_packed_attention
from relibra.rl.model.policy import ModelStructure, Policy
from relibra.rl.model.sharding import decoder_layers, full_parameters, keep_activations, load_sharded, save_activations
from relibra.rl.model.token_scores import learn_logits
from relibra.rl.update import policy_update, value_update
from relibra.rl.update.credit import compute_values
from relibra.rl.update.policy_update import update_policy
from relibra.rl.update.recompute import recompute, reference_log_probs, score_tokens
from relibra.rl.update.value_update import update_values


@runtime_checkable
class Meter(Protocol):
    """Counts memory by phase, and by part as far as it can."""

    def begin(self, phase: str) -> None:
        """Count what follows to a phase."""

    def begin_layers(self) -> None:
        """Count what follows to the layers of an update."""

    def own(self, part: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count the storages of tensors to a part."""

    def watch_layers(self, layers: Sequence[nn.Module]) -> None:
        """Learn which decoder layers a pass goes through."""

    def loaded(self, model: nn.Module) -> None:
        """Learn of a model, whose weights nobody has written."""


class StepRun:
    """Models of a rank, and the functions of an RL step that run them.

    The process group and the device may be real ones: benchmarks compare what a meter says of both.

    saved         bytes that each decoder layer saves beside its input, per token and per token-slot; after `steps`,
                  where a plan decides what layers keep
    token_slots   of a layer, the most
    """

    saved: Sequence[tuple[float, float]] = ()
    token_slots = 0

    def __init__(
        self,
        config: RunConfig,
        model_config: Any,
        structure: ModelStructure,
        cluster: Cluster,
        device: torch.device,
        meter: Meter,
        *,
        has_copy: bool,
        keep: Sequence[str] = (),
    ) -> None:
        """Load what the run holds; collective.

        model_config   of transformers, with as many layers as shall run
        has_copy       a full copy of the policy is in the device memory
        keep           what each layer keeps (`keep_activations`); none: as the settings say
        """
        self.config, self.cluster, self.meter, self._device = config, cluster, meter, device
        self._model_config, self._structure = model_config, structure
        with torch.device("meta"):
            code = config.model.trust_remote_code
            meta = AutoModelForCausalLM.from_config(copy.deepcopy(model_config), trust_remote_code=code)
        self._class = type(meta)
        self._packed = meta._supports_sdpa or meta._supports_flash_attn  # a real run tests this on the loaded model
        trained = self._load(self._class, model_config, lora=config.lora)
        merged_type = torch.float32 if config.lora.rank else getattr(torch, config.model.dtype)
        self.policy: Any = SimpleNamespace(
            **vars(structure),
            trained=trained,
            balanced=config.follows_plans and structure.num_experts > 0,
            copy=meta.to(merged_type).to_empty(device=device) if has_copy else None,
        )
        save_activations(trained, config.update.activations)
        if keep:
            keep_activations(trained, keep)
        self._by_plan = config.update.activations == "plan"
        if self._by_plan:
            decoder_layers(trained)[-1].register_forward_hook(self._after_layers)
        self.optimizer = make_optimizer(trained, config.update.learning_rate, config.update)
        self.reference: Any = None
        self.critic: Any = None
        self.critic_optimizer: Any = None
        if config.algorithm.kl_coefficient and config.lora.rank:
            self.reference = trained  # without its adapters
        elif config.algorithm.kl_coefficient:
            self.reference = self._load(self._class, model_config, frozen=True)
        if config.algorithm.advantage == "gae":
            of_values = copy.deepcopy(model_config)
            of_values.num_labels, of_values.classifier_dropout, of_values.token_classification_bias = 1, 0.0, False
            self.critic = self._load(value_model_class(self._class), of_values)
            save_activations(self.critic, config.update.activations)
            self.critic_optimizer = make_optimizer(self.critic, config.critic.learning_rate, config.update)
        meter.watch_layers(list(decoder_layers(trained)))
        self.own()
        for idle in (self.critic, self.reference) if config.update.offload != "off" else ():
            if idle is not None and idle is not trained:
                move_to_host(idle)

    def _load(
        self, model_class: Any, model_config: Any, *, frozen: bool = False, lora: LoraSettings | None = None
    ) -> Any:
        def without_weights(_path: str, **options: Any) -> Any:
            return model_class.from_pretrained(None, state_dict={}, **options)

        model = load_sharded(
            SimpleNamespace(from_pretrained=without_weights),
            "",
            model_config=copy.deepcopy(model_config),
            settings=self.config.model,
            device=self._device,
            num_experts=self._structure.num_experts,
            follows_plans=self.config.follows_plans,
            frozen=frozen,
            lora=lora,
        )
        if self._packed:
            use_packed_attention(model)
        else:
            use_explicit_masks(model, getattr(torch, self.config.model.dtype))
        self.meter.loaded(model)
        if model_class is self._class:
            learn_logits(model)
        return model

    def own(self, context: BatchExecution | None = None) -> None:
        """Count storages to the parts that own them."""
        own = self.meter.own
        for part, model, optimizer in (
            ("", self.policy.trained, self.optimizer),
            ("reference", None if self.reference is self.policy.trained else self.reference, None),
            ("critic", self.critic, self.critic_optimizer),
        ):
            if model is None:
                continue
            own(part or "weights", [*model.parameters(), *model.buffers()])
            for of_fsdp in _fsdp_parameters(model):
                own(part or "weights", of_fsdp.all_gather_outputs)
                own(part or "gradients", [of_fsdp.unsharded_accumulated_grad])
            own(part or "gradients", [one.grad for one in model.parameters()])
            if optimizer is not None:
                states = [value for state in optimizer.state.values() for value in state.values()]
                for one in states:
                    if isinstance(one, torch.Tensor) and one.ndim:
                        own(part or "moments", blocks_of(one).values() or [one])
        if self.policy.copy is not None:
            own("copy", [*self.policy.copy.parameters(), *self.policy.copy.buffers()])
        own("slots", self._slots(context))

    def _slots(self, context: BatchExecution | None = None) -> list[torch.Tensor]:
        """Return weights and sums of all slots that there are."""
        if not self.policy.balanced:
            return []
        shared = next(iter(balanced_layers(self.policy.trained).values())).group_state
        slots = [] if shared is None or shared.buffer is None else [shared.buffer]
        if context is not None and context.execution is not None:
            slots += context.execution._executed.slots._of_layers.values()
        return [one for buffer in slots for one in (*buffer.weights.values(), *buffer._sums.values())]

    def _count_saved(self, batch: TrainingBatch) -> None:
        """Learn what each layer saves from a forward pass of the first micro-batch, which keeps nothing."""
        layers = decoder_layers(self.policy.trained)
        assert batch.demand is not None, "routes are replayed"
        plan = batch.plan or StepPlan.static(batch.demand, self.cluster.topology)
        token_slots_L = plan.rank_load(batch.demand)[0, :, 0]
        token_slots_of = dict(zip(plan.layer_ids.tolist(), token_slots_L.tolist(), strict=True))
        balanced = balanced_layers(self.policy.trained) if self.policy.balanced else {}
        experts = {number: layer.experts for number, layer in balanced.items()}
        keep_activations(self.policy.trained, [ALL] * len(layers))
        with (
            self._executing(batch, "") as context,
            context(0),
            counting_saved(list(layers), experts, self._slots()) as found,
        ):
            read = batch.micro_batches[0].to(self._device)
            score_tokens(self.policy.trained, read, self.config.rollout.temperature)
        tokens = batch.micro_batches[0].tokens_1T.shape[1]
        self.saved = [
            (outside / tokens, inside / max(1, token_slots_of.get(n, 1))) for n, (outside, inside) in enumerate(found)
        ]
        self.token_slots = int(token_slots_L.max(initial=0))

    def _after_layers(self, _layer: nn.Module, _given: Any, output: Any) -> None:
        """Count the loss apart: between the last layer's forward and backward pass all layers hold what they keep."""
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            self.meter.begin("update")
            hidden.register_hook(lambda _: self.meter.begin_layers())

    def steps(self, batch: TrainingBatch) -> None:
        """Run an RL step in an order in which every phase holds what it holds from the second step on."""
        config, policy, meter = self.config, self.policy, self.meter
        loss, update, ranks = find_loss(config), config.update.model_copy(update={"epochs": 1}), dist.get_world_size()
        if self.critic is not None:
            self._update_values(batch)
        with self._steps_apart(policy_update, "update"), self._executing(batch, "update") as context:
            update_policy(
                policy.trained, self.optimizer, batch, context, loss, update, count=StepCount(), num_ranks=ranks
            )
        with self._executing(batch, "recompute") as context:
            recompute(
                policy.trained, batch, context, config.algorithm, temperature=config.rollout.temperature,
                record=config.algorithm.replay == "R2",
            )  # fmt: skip
        if self._by_plan:
            self._count_saved(batch)
        if self.reference is not None:
            meter.begin("reference")
            with without_adapters(self.reference), on_device(self.reference):
                reference_log_probs(self.reference, batch, config.rollout.temperature)
        if batch.plan is not None and config.plan.move_homes:
            meter.begin("relocate")
            homes_LE = batch.plan.physical_to_logical_map
            relocate(policy.trained, np.roll(homes_LE, homes_LE.shape[1] // ranks, axis=1), self.optimizer)
        meter.begin("sync")
        self._sync()
        with idle_while_sampling(policy.trained, config.update):
            meter.begin("rollout")

    def _sync(self) -> None:
        """Give the weights to the copy, or gather them, one after another, for a server."""
        if self.policy.copy is not None:
            Policy.sync(self.policy)
            return
        for _ in full_parameters(self.policy.trained):
            continue

    def _update_values(self, batch: TrainingBatch) -> None:
        responses = [replace(one, reward=0.0, values_r=np.zeros(one.length, np.float32)) for one in batch.responses]
        self.meter.begin("values")
        with on_device(self.critic):
            compute_values(self.critic, responses, self.config.update.micro_batch_tokens)
        self.meter.begin("update values")
        with on_device(self.critic), self._steps_apart(value_update, "update values"):
            update_values(
                self.critic,
                self.critic_optimizer,
                responses,
                self.config.critic,
                self.config.update.model_copy(update={"mini_batches": 2, "epochs": 1}),
                by_group=False,
                seed=0,
                responses_per_step=len(responses) * dist.get_world_size(),
                count=StepCount(),
                num_ranks=dist.get_world_size(),
            )

    @contextmanager
    def _executing(self, batch: TrainingBatch, phase: str) -> Iterator[Any]:
        """Yield a function: number of a micro-batch -> its context, which counts storages to owners at the end."""
        self.meter.begin(phase)
        planned = batch.plan is not None  # else experts stay at home: live balancing would read routes from the device
        at_home = nullcontext(BatchExecution(model=self.policy.trained, batch=batch))
        with executing(self.policy, batch, self.config.plan, self.cluster) if planned else at_home as context:

            @contextmanager
            def of_micro_batch(number: int) -> Iterator[Any]:
                if self._by_plan and phase == "update":
                    self.meter.begin_layers()
                with context(number) as replay:
                    yield replay
                    self.own(context)

            yield of_micro_batch
            assert not context.ran_at_home, "the plan of a dry run is followed"

    @contextmanager
    def _steps_apart(self, module: Any, phase: str) -> Iterator[None]:
        """Count optimizer steps inside as a phase of their own."""
        step: Callable[..., Any] = module.step_or_skip

        def step_apart(*args: Any, **options: Any) -> Any:
            self.own()
            self.meter.begin("optimizer" if phase == "update" else phase)
            result = step(*args, **options)
            self.own()
            self.meter.begin(phase)
            return result

        with patch.object(module, "step_or_skip", step_apart):
            yield


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                yield from group.fsdp_params if group else ()
