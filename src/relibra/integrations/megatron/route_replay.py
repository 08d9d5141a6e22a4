"""`RouteReplay`: recorded routes for the routers of a Megatron model, through its own `RouterReplay`.

Megatron takes the ids, gathers the router's live scores at them, and normalises those: gradients reach the router. What
it leaves to the caller is done here: routers are found in the model and matched by layer number (the global list of
`RouterReplay` mixes models and includes draft layers), recomputation is recognised, and no queue keeps leftovers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Integer
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import EngineError


def find_routers(chunks: Sequence[nn.Module]) -> dict[int, Any]:
    """Return the routers of a model by absolute decoder layer, from 0; draft (MTP) layers are left out.

    chunks   the model on this rank: one module, or one per virtual pipeline stage
    raises   EngineError where a router cannot follow recorded routes
    """
    routers: dict[int, Any] = {}
    for chunk in chunks:
        for module in chunk.modules():
            router: Any = module
            if not hasattr(router, "router_replay") or getattr(router, "is_mtp_layer", False):
                continue
            _check_router(router)
            routers[int(router.layer_number) - 1] = router
    if not routers:
        raise EngineError("the model has no routers on this rank: pass the chunks of a Megatron MoE model")
    return dict(sorted(routers.items()))


def _check_router(router: Any) -> None:
    config = router.config
    if router.router_replay is None:
        raise EngineError("the routers have no RouterReplay: build the model with moe_enable_routing_replay=True")
    if getattr(config, "moe_router_fusion", False):
        raise EngineError("moe_router_fusion=True chooses experts past RouterReplay: build the model with False")
    if config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"):
        raise EngineError(
            f"routers of type {config.moe_router_load_balancing_type} are not replayed by Megatron: use 'none' or an "
            "auxiliary loss"
        )
    refuse_deepep(config)


def refuse_deepep(config: Any) -> None:
    """Raise EngineError where tokens are dispatched to other experts than the router chose.

    Megatron's `_DeepepManager` computes ids again, from the largest probabilities, so a recorded expert whose
    probability has become 0 is replaced by any other one.
    """
    flex = config.moe_token_dispatcher_type == "flex"
    if flex and getattr(config, "moe_flex_dispatcher_backend", "deepep") == "deepep":
        raise EngineError(
            "the dispatcher flex/deepep computes expert ids again from topk(probs), so recorded routes are not "
            "followed where a probability is 0: use moe_token_dispatcher_type='alltoall'"
        )


class RouteReplay:
    """Routers of one model that follow recorded routes.

    While it is attached, routers follow the routes of the micro-batch begun last. Before the first and after `clear`
    they choose by themselves; such passes must not be recomputed. Leave `RouterReplay`'s global action alone meanwhile.

        replay = RouteReplay([model])
        with replay:
            for ids_TLK in micro_batches:
                replay.begin(ids_TLK)
                loss(model(...)).backward()
    """

    def __init__(self, chunks: Sequence[nn.Module], layer_ids: Sequence[int] | None = None) -> None:
        """Find the routers; raises EngineError as `find_routers`, and for layers that the routes lack.

        layer_ids   absolute decoder layer of each entry of the routes' layer axis; None: entry i is decoder layer i
        """
        self._routers = find_routers(chunks)
        self._position = {layer: layer for layer in self._routers}
        if layer_ids is not None:
            self._position = {int(layer): position for position, layer in enumerate(layer_ids)}
        if missing := sorted(self._routers.keys() - self._position.keys()):
            raise EngineError(f"layers {missing} have routers, and the routes are of layers {list(self._position)}")
        self._passes: dict[int, LayerPasses[Tensor]] = {layer: LayerPasses() for layer in self._routers}

    def __enter__(self) -> RouteReplay:
        """Attach to the routers."""
        self._handles = [
            router.register_forward_pre_hook(partial(self._set_target, layer))
            for layer, router in self._routers.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Detach: routers choose by themselves again."""
        for handle in self._handles:
            handle.remove()
        self.clear()
        for router in self._routers.values():
            router.router_replay.clear_router_replay_action()
            router.router_replay.clear_indices()

    def begin(self, ids_TLK: Integer[ndarray, "T L K"] | None) -> None:
        """Let the next forward pass take these experts; called before it, with gradients on or off as in that pass.

        ids_TLK   of each row that this rank's routers see, in their order (`PackedRows.routes`); None: routers choose
        raises    EngineError where a row names an expert twice or out of range, or routes lack a layer or differ in K
        """
        for layer, router in self._routers.items():
            self._passes[layer].begin(None if ids_TLK is None else self._checked(layer, router, ids_TLK))

    @property
    def num_awaiting(self) -> int:
        """Return the forward passes of layers that wait for their recomputation; 0 between steps."""
        return sum(passes.num_awaiting for passes in self._passes.values())

    def clear(self) -> None:
        """Forget the micro-batch, and forward passes that were not recomputed."""
        for passes in self._passes.values():
            passes.clear()

    def _checked(self, layer: int, router: Any, ids_TLK: Integer[ndarray, "T L K"]) -> Tensor:
        position, (_, L, K) = self._position[layer], ids_TLK.shape
        if position >= L or router.topk != K:
            raise EngineError(
                f"layer {layer} chooses {router.topk} experts, and the routes have {L} layers of {K} choices: pass the "
                "routes of this model, with layer_ids where they lack dense layers"
            )
        ids_TK = np.ascontiguousarray(ids_TLK[:, position], dtype=np.int32)
        order_TK = np.sort(ids_TK, axis=1)
        if ids_TK.size and (order_TK.min() < 0 or order_TK.max() >= router.config.num_moe_experts):
            raise EngineError(
                f"layer {layer}: routes name experts {order_TK.min()} to {order_TK.max()} of "
                f"{router.config.num_moe_experts}"
            )
        twice_T = (order_TK[:, 1:] == order_TK[:, :-1]).any(axis=1)
        if twice_T.any():
            raise EngineError(
                f"layer {layer}, row {int(np.argmax(twice_T))}: the routes name an expert twice "
                f"({ids_TK[int(np.argmax(twice_T))].tolist()}), as rows that an engine did not capture: leave the "
                "sample out, or mark such rows -1 for PackedRows.routes"
            )
        return torch.from_numpy(ids_TK)

    def _set_target(self, layer: int, router: Any, inputs: tuple[Tensor, ...]) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        ids_TK = self._passes[layer].take(f"the router of layer {layer}")
        rows = inputs[0].numel() // inputs[0].shape[-1]
        if ids_TK is not None and len(ids_TK) != rows:  # Megatron would gather the first rows, and go on
            raise EngineError(
                f"layer {layer}: the router has {rows} rows, and the routes of this micro-batch {len(ids_TK)}: lay "
                "them out as the trainer does (RowLayout), with its padding"
            )
        replay = router.router_replay
        if ids_TK is None:
            replay.target_topk_idx = None
            replay.clear_router_replay_action()
        else:
            replay.target_topk_idx = ids_TK.to(inputs[0].device, torch.int64)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


Entry = TypeVar("Entry")


def is_recompute() -> bool:
    """Return whether a backward pass is running: a layer that runs inside it is recomputed."""
    # A copy of the one in `relibra.replay.routers`, which imports transformers in the version that relibra trains with.
    return torch._C._current_graph_task_id() != -1


class LayerPasses(Generic[Entry]):
    """Entries of one layer: what it needs in the micro-batch that it runs, and again when that is recomputed.

    Pipeline schedules run forward k + 1 before backward k, and recomputation happens inside the backward pass, so there
    is no one current micro-batch. As in Megatron's `RouterReplay`, each layer keeps a queue: filled by forward passes,
    emptied by recomputations.
    """

    def __init__(self) -> None:
        """Start without a micro-batch."""
        self._entry: Entry | None = None
        self._trains = False
        self._awaiting: deque[Entry | None] = deque()

    def begin(self, entry: Entry | None) -> None:
        """Let the next forward passes use this entry; None: none.

        Called where gradients are enabled as in the forward pass of the model: without them nothing is recomputed.
        """
        self._entry, self._trains = entry, torch.is_grad_enabled()

    def take(self, where: str) -> Entry | None:
        """Return the entry of the pass that runs now.

        where    layer, for the message
        raises   EngineError in a recomputation without a forward pass
        """
        if is_recompute():
            if not self._awaiting:
                raise EngineError(
                    f"{where} is recomputed more often than it ran forward: begin a micro-batch before each forward "
                    "pass, and clear only between steps"
                )
            return self._awaiting.popleft()
        if self._trains and not torch.is_grad_enabled():  # a checkpoint: the backward pass runs the layer again
            self._awaiting.append(self._entry)
        return self._entry

    @property
    def num_awaiting(self) -> int:
        """Return the number of forward passes that wait for their recomputation."""
        return len(self._awaiting)

    def clear(self) -> None:
        """Forget everything; between steps."""
        self._entry, self._trains = None, False
        self._awaiting.clear()
