"""`PlannedMoELayer`: Megatron's `MoELayer` whose experts run where a plan puts them.

Router, auxiliary losses, expert bias: Megatron's, in logical order; they end before `preprocess`, where this layer
begins. The module has the parameters of `MoELayer`, under the same names: replicas are weights that other ranks push
for one pass, so optimizers, checkpoints and exporters do not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relibra.errors import EngineError
from relibra.integrations.megatron.expert_weights import (
    ExpertParameter,
    PushReplicas,
    ReplicaExchange,
    expert_parameters,
    weights_replaced,
)
from relibra.integrations.megatron.route_replay import LayerPasses, refuse_deepep
from relibra.integrations.shared_failures import all_gather
from relibra.planning.traffic.rank_tables import Place, RankTables, home_tables


@dataclass(eq=False)
class LayerPlan:
    """A micro-batch of a plan in one layer; the same object serves the forward pass and its recomputation.

    make_tables       returns the tables of this rank
    note_difference   is given the place, and the token-slots that were chosen and planned
    """

    make_tables: Callable[[], RankTables]
    note_difference: Callable[[str, Tensor, Tensor], None]

    @cached_property
    def tables(self) -> RankTables:
        """Return the tables of this rank."""
        return self.make_tables()

    def check(self, tokens_E: Tensor) -> None:
        """Compare the token-slots that the router chose with the planned ones."""
        planned_E = torch.from_numpy(self.tables.tokens_E).to(tokens_E.device, non_blocking=True)
        self.note_difference(str(self.tables.place), tokens_E, planned_E)


@dataclass(eq=False)
class _Run:
    """The pass that runs now: its tables, and weights that replace parameters.

    of_homes    parameters of pushed experts, and tensors in their place, whose gradients include those of replicas
    received    parameters of each filled replica slot
    """

    tables: RankTables
    of_homes: list[tuple[ExpertParameter, Tensor]] = field(default_factory=list)
    received: list[tuple[Tensor, ...]] = field(default_factory=list)


class PlannedMoELayer(MoELayer):  # type: ignore[misc]
    """MoE layer whose experts run at home, or where the plan of `execute_plan` puts them.

    physical_to_logical_E   logical expert at each position; position p is local expert p % (E / R) of rank p // (E / R)
    passes                  what the plan says of each pass; if nothing, experts run at home, and counts are exchanged
    raises                  EngineError for a configuration that it cannot run
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Build Megatron's layer, with another dispatcher."""
        pg_collection = get_default_pg_collection() if pg_collection is None else pg_collection
        _check_config(config, pg_collection)
        super().__init__(config, submodules, layer_number, pg_collection, *args, **kwargs)
        self.token_dispatcher = PlannedDispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
        )
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        self.physical_to_logical_E = np.arange(self.config.num_moe_experts)
        self.passes: LayerPasses[LayerPlan] = LayerPasses()
        self.experts.register_state_dict_pre_hook(self._refuse_physical_order)
        self.experts.register_load_state_dict_pre_hook(self._refuse_physical_order)
        self._run: _Run | None = None

    @property
    def layer_id(self) -> int:
        """Return the absolute decoder layer, from 0."""
        return int(self.layer_number) - 1

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Return rows and their routing weights, to be sent; push the parameters of replicas before."""
        plan = self.passes.take(f"layer {self.layer_id}")
        tokens_E = routing_map.sum(dim=0)
        if plan is None:
            tables = self._count_home_tables(tokens_E)
        else:
            plan.check(tokens_E)
            tables = plan.tables
        self._run = _Run(tables)
        if tables.pushes:
            hidden_states, probs = self._push(self._run, hidden_states, probs)
        self.token_dispatcher.tables = tables
        return super().preprocess(hidden_states, probs, routing_map)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """Return the results of arrived rows: of experts at home, then of replicas."""
        run, n = self._run, self.num_local_experts
        assert run is not None, "preprocess runs before the experts"
        rows_YH, counts_P, weight_Y = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        counts = counts_P.tolist()
        with weights_replaced(run.of_homes):
            first = sum(counts[:n])
            outputs = [self._compute(rows_YH[:first], counts[:n], weight_Y[:first])]
        filled = [push.slot for _, push in run.tables.pushes_to_here]
        for start in range(0, len(filled), n):
            some = slice(start, start + n)
            sizes = [counts[n + slot] for slot in filled[some]]
            rows = slice(first, first + sum(sizes))
            with weights_replaced(self._replica_weights(run.received[some])):
                outputs.append(self._compute(rows_YH[rows], sizes + [0] * (n - len(sizes)), weight_Y[rows]))
            first = rows.stop
        self._run = None
        output_YH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.token_dispatcher.combine_preprocess(output_YH), None

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return Megatron's sharded state dict; raises EngineError while experts are not in logical order."""
        self._refuse_physical_order()
        return super().sharded_state_dict(*args, **kwargs)

    def expert_parameters(self, slot: int) -> list[ExpertParameter]:
        """Return the parameters of a local expert."""
        return expert_parameters(self.experts, slot)

    def _compute(self, rows_YH: Tensor, counts: Sequence[int], weight_Y: Tensor) -> Tensor:
        output_YH, bias = self.experts(rows_YH, torch.tensor(counts), weight_Y)
        assert bias is None, "Megatron's dispatchers take no bias either"
        return output_YH

    def _push(self, run: _Run, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        like = [parameter.tensor for parameter in self.expert_parameters(0)]
        exchange = ReplicaExchange(tables=run.tables, group=self.ep_group, like=[t.detach() for t in like])
        pushed = [p for slot in exchange.pushed_slots for p in self.expert_parameters(slot)]
        outputs = PushReplicas.apply(exchange, hidden_states, probs, like[0], *(p.tensor for p in pushed))
        hidden_states, probs, *weights = outputs
        run.of_homes = list(zip(pushed, weights[: len(pushed)], strict=True))
        received = weights[len(pushed) :]
        run.received = [tuple(received[i : i + len(like)]) for i in range(0, len(received), len(like))]
        return hidden_states, probs

    def _replica_weights(self, received: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[ExpertParameter, Tensor]]:
        """Yield weights for all local experts: those of replicas first; the others have no rows, and keep theirs."""
        for slot in range(self.num_local_experts):
            parameters = self.expert_parameters(slot)
            own = [parameter.tensor.detach() for parameter in parameters]
            yield from zip(parameters, received[slot] if slot < len(received) else own, strict=True)

    def _count_home_tables(self, tokens_E: Tensor) -> RankTables:
        """Exchange the counts of token-slots; return the tables without replicas."""
        counts_RE = all_gather(tokens_E, self.ep_group)
        place = Place(dist.get_rank(self.ep_group), self.layer_id, -1)
        return home_tables(torch.stack(counts_RE).cpu().numpy(), self.physical_to_logical_E, place)

    def _refuse_physical_order(self, *_: object) -> None:
        if (self.physical_to_logical_E != np.arange(len(self.physical_to_logical_E))).any():
            raise EngineError(
                f"layer {self.layer_id}: a state dict is saved or loaded while experts are not in logical order, which "
                "its readers and writers expect: do it inside `with logical_order(chunks, optimizer)`"
            )


def with_planned_layers(spec: Any) -> Any:
    """Return a spec whose MoE layers are `PlannedMoELayer`: of a layer, of a block, or of a hybrid stack.

    Goes where Megatron takes a spec: `GPTModel(transformer_layer_spec=...)`, slime's `--spec`, Megatron-Bridge's
    `provider.transformer_layer_spec`. Other layers stay as they are.

    raises   EngineError where no layer has experts
    """
    if hasattr(spec, "layer_specs"):  # a block: dense and MoE layers
        found = [_planned_layer(layer_spec) for layer_spec in spec.layer_specs]
        changed = any(new is not None for new in found)
        planned = replace(spec, layer_specs=[new or old for new, old in zip(found, spec.layer_specs, strict=True)])
    else:
        planned = _planned_layer(spec) or _planned_stack(spec)
        changed = planned is not None
    if not changed:
        raise EngineError("no layer of the spec has experts (MoELayer): pass the spec of an MoE model")
    return planned


def _planned_stack(spec: Any) -> Any:
    """Return the spec of a stack that names its kinds of layers, such as HybridStack; None: none has experts."""
    submodules: Any = getattr(spec, "submodules", None)
    if not is_dataclass(submodules):
        return None
    found = {entry.name: _planned_layer(getattr(submodules, entry.name)) for entry in fields(submodules)}
    changed = {name: planned for name, planned in found.items() if planned is not None}
    return replace(spec, submodules=replace(submodules, **changed)) if changed else None  # type: ignore[type-var]


def _planned_layer(spec: Any) -> Any:
    """Return the spec of a layer with planned experts; None: it has no experts."""
    submodules: Any = getattr(spec, "submodules", None)
    mlp: Any = getattr(submodules, "mlp", None)
    if isinstance(mlp, partial) and mlp.func is MoELayer:
        planned: Any = partial(PlannedMoELayer, *mlp.args, **mlp.keywords)
    elif getattr(mlp, "module", None) is MoELayer:  # a ModuleSpec, as older versions have it
        planned = replace(mlp, module=PlannedMoELayer)
    else:
        return None
    return replace(spec, submodules=replace(submodules, mlp=planned))


def _check_config(config: Any, groups: Any) -> None:
    """Raise EngineError for a configuration that planned layers cannot run."""
    refuse_deepep(config)
    needed = {
        "moe_token_dispatcher_type": ("alltoall", "sizes of its exchange are set from the plan"),
        "moe_expert_capacity_factor": (None, "dropped tokens are in no plan"),
        "moe_pad_expert_input_to_capacity": (False, "padding to capacity is in no plan"),
        "moe_router_padding_for_quantization": (False, "padded rows are in no plan"),
        "overlap_moe_expert_parallel_comm": (False, "it calls parts of a layer in another order"),
        "overlap_dispatch_backward_with_experts_wgrad": (False, "gradients of replicas would come too late"),
        "cuda_graph_impl": ("none", "sizes change with each micro-batch"),
        "fp8": (None, "scales of replicas do not travel"),
        "fp4": (None, "scales of replicas do not travel"),
    }
    for name, (value, reason) in needed.items():
        if getattr(config, name, value) != value:
            raise EngineError(
                f"planned MoE layers need {name}={value!r}, and it is {getattr(config, name)!r}: {reason}"
            )
    if getattr(config, "transformer_impl", "") == "inference_optimized":
        raise EngineError("planned MoE layers train: build a model for inference from Megatron's own spec")
    if dist.get_world_size(groups.expt_tp) > 1:
        raise EngineError("planned MoE layers need expert_tensor_parallel_size=1: an expert is whole on its rank")


class PlannedDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """All-to-all dispatcher whose local experts are the slots of a plan: E / R homes, then replicas.

    Sizes come from `tables`: it exchanges no counts, and does not wait for the device. Rows are permuted by logical
    expert, as Megatron does, and then brought into the order of the plan's slots; results come back the same way. So
    every sum over the experts of a token is in the order of logical experts: its bits do not depend on homes or
    replicas.

    tables   of the layer and micro-batch that runs now; set before each pass
    """

    tables: RankTables
    _num_slots: int = 0
    _order_X: Tensor | None = None
    _back_X: Tensor | None = None

    def preprocess(self, _routing_map: Tensor) -> Tensor:
        """Return the rows of each local slot, from the tables."""
        tables = self.tables
        self.num_out_tokens = int(tables.send_RP.sum())
        self.input_splits = tables.send_RP.sum(axis=1).tolist()
        self.output_splits = tables.receive_RP.sum(axis=1).tolist()
        self.output_splits_tp = None
        self._set_slots(tables.receive_RP.shape[1])
        self.num_global_tokens_per_local_expert = torch.from_numpy(tables.receive_RP).to(self.permute_idx_device)
        return torch.from_numpy(tables.receive_RP.sum(axis=0))

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and their weights in the order in which they are sent: by rank, slot, position."""
        rows_XH, weight_X = super().dispatch_preprocess(hidden_states, routing_map, probs)
        order_X = self.tables.send_order_X
        if np.array_equal(order_X, np.arange(len(order_X))):
            self._order_X = self._back_X = None
            return rows_XH, weight_X
        back_X = np.empty_like(order_X)
        back_X[order_X] = np.arange(len(order_X))  # the inverse, without a second sort
        self._order_X = torch.from_numpy(order_X).to(rows_XH.device, non_blocking=True)
        self._back_X = torch.from_numpy(back_X).to(rows_XH.device, non_blocking=True)
        return rows_XH[self._order_X], weight_X[self._order_X]

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum over the experts of each token, from rows in the order in which they were sent."""
        rows_XH = permutated_local_input_tokens
        return super().combine_postprocess(rows_XH if self._back_X is None else rows_XH[self._back_X])

    def _set_slots(self, num_slots: int) -> None:
        """Sort arrived rows by this many local slots."""
        if num_slots == self._num_slots:
            return
        chunk_RP = torch.arange(self.ep_size * num_slots, device=self.permute_idx_device)
        self.sort_input_by_local_experts = chunk_RP.reshape(-1, num_slots).T.ravel()
        self.restore_output_by_local_experts = chunk_RP.reshape(num_slots, -1).T.ravel()
        self.num_local_experts = self._num_slots = num_slots

    def _maybe_dtoh_and_synchronize(self, _point: str, tokens_per_expert: Any = None) -> Any:
        """Return the counts: all of them are on the host already."""
        return tokens_per_expert
