"""The experts of a layer as the model sees them: rows go to expert workers, sums come back and are added up here.

`transformers` calls the implementation that a model's configuration names in place of an experts module's own forward.
Router, shared experts and residuals stay the model's own code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from relibra.errors import EngineError
from relibra.planning.deployment.worker_choice import LOAD_CAP, choose_workers
from relibra.serving.exchange.addressing import address_choices
from relibra.serving.exchange.attention_side import SlotExchange, WorkerLostError
from relibra.serving.layout import check_holders, held_by
from relibra.timeline import TimelineRecorder

NAME = "relibra_remote"
"""Value of `experts_implementation` that selects remote experts."""
_LAYER = "_relibra_layer"
_current = threading.local()


@dataclass(eq=False)
class RemoteExperts:
    """Experts of all layers for one micro-batch.

    exchange    its channels to the expert workers
    token       held while this micro-batch computes, released while it waits for experts
    cap         tokens choose copies that save rows on workers whose load is below cap x mean load
    load_LE     choices of each expert in each layer since the start
    recorder    of this worker's timeline; None: nothing is recorded
    routes      expert ids of the forward pass under way, one tensor `[T, K]` per layer
    """

    exchange: SlotExchange
    token: ComputeToken
    cap: float = LOAD_CAP
    recorder: TimelineRecorder | None = None
    load_LE: Int64[ndarray, "L E"] = field(init=False)
    routes: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with all workers."""
        self._since = 0.0
        self._token_Y: Tensor | None = None
        experts_of = self.exchange.shape.experts_of
        num_experts = 1 + max(max(own, default=0) for layers in experts_of for own in layers)
        self._held_LNE, self._held_of = held_by(experts_of, num_experts), (experts_of, frozenset[int]())
        self.load_LE = np.zeros((len(self._held_LNE), num_experts), dtype=np.int64)

    @contextmanager
    def forward_pass(self, mask_T: Bool[Tensor, " T"]) -> Iterator[list[Tensor]]:
        """Run the model inside; yield a list that its layers fill with their routes `[T, K]`.

        mask_T   rows that are tokens; padding goes to no expert
        """
        self.routes, self._token_Y = [], None if mask_T.all() else mask_T.nonzero()[:, 0]
        self._take_token()
        try:
            with _calling(self.run_layer):
                yield self.routes
        finally:
            self._give_token(-1)

    def run_layer(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return each token's weighted sum of outputs of experts: sums of the workers, added in the workers' order."""
        self.routes.append(ids_TK)
        if (token_Y := self._token_Y) is None:
            return self._run_pieces(layer, hidden_TH, ids_TK, weights_TK)
        sums_YH = self._run_pieces(layer, hidden_TH[token_Y], ids_TK[token_Y], weights_TK[token_Y])
        return torch.zeros_like(hidden_TH).index_copy_(0, token_Y, sums_YH)

    def _run_pieces(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        most = self.exchange.shape.max_tokens
        if len(hidden_TH) <= most:
            return self._run_rows(layer, hidden_TH, ids_TK, weights_TK)
        pieces = zip(hidden_TH.split(most), ids_TK.split(most), weights_TK.split(most), strict=True)
        return torch.cat([self._run_rows(layer, *piece) for piece in pieces])

    def _run_rows(
        self,
        layer: int,
        hidden_TH: Float[Tensor, "T H"],
        ids_TK: Int64[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
    ) -> Float[Tensor, "T H"]:
        expert_TK, gate_X = ids_TK.numpy(), weights_TK.float().numpy().ravel()
        self.load_LE[layer] += np.bincount(expert_TK.ravel(), minlength=self.load_LE.shape[1])
        while True:
            held_NE = self._held()[layer]
            worker_TK = choose_workers(expert_TK, held_NE, self.cap)
            addressed = address_choices(expert_TK, worker_TK, *held_NE.shape)
            token_Y = torch.from_numpy(addressed.token_Y)
            torch.index_select(hidden_TH, 0, token_Y, out=self.exchange.rows(len(token_Y)))
            self.exchange.dispatch(layer, addressed, gate_X[addressed.choice_C])
            self._give_token(layer)
            try:
                result_YH = self.exchange.collect(layer)
                break
            except WorkerLostError:
                pass  # again, on the copies that are left; without them, `_held` raises
            finally:
                self._record("await experts", layer)
                self._take_token()
        sum_TH = torch.zeros(hidden_TH.shape).index_add_(0, token_Y, result_YH.float())
        return sum_TH.to(hidden_TH.dtype)

    def _take_token(self) -> None:
        self.token.acquire()
        self._since = time.perf_counter()

    def _give_token(self, layer: int) -> None:
        self._record("attention", layer)
        self.token.release()

    def _record(self, stage: str, layer: int) -> None:
        """Note that a stage has lasted from the end of the one before until now."""
        now = time.perf_counter()
        if self.recorder is not None:
            seconds, slot = now - self._since, self.exchange.slot
            self.recorder.add(stage, start=self._since, seconds=seconds, layer=layer, micro_batch=slot)
        self._since = now

    def _held(self) -> Bool[ndarray, "L N E"]:
        """Return the experts of the workers that are there; raises EngineError if an expert is nowhere."""
        experts_of, lost = current = self.exchange.shape.experts_of, frozenset(self.exchange.lost)
        if current != self._held_of:
            held_LNE = held_by(experts_of, self.load_LE.shape[1])
            try:
                check_holders(held_LNE, lost)
            except EngineError as error:
                raise EngineError(f"{error}. The first error: {next(iter(self.exchange.lost.values()))}") from None
            held_LNE[:, list(lost)] = False
            self._held_LNE, self._held_of = held_LNE, current
        return self._held_LNE


@contextmanager
def _calling(run_layer: Callable[..., Tensor]) -> Iterator[None]:
    """Let a function compute the experts of each layer inside, in this thread."""
    _current.run_layer = run_layer
    try:
        yield
    finally:
        _current.run_layer = None


def without_experts() -> AbstractContextManager[None]:
    """Let the model run inside, in this thread, with experts that return zeros: to look at its caches."""
    return _calling(lambda _layer, hidden_TH, *_: torch.zeros_like(hidden_TH))


def use_remote_experts(model: nn.Module, experts: Sequence[str]) -> None:
    """Let the experts modules of a model, named by ascending layer, run remotely; they need no weights."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _run_remotely)
    for layer, path in enumerate(experts):
        setattr(model.get_submodule(path), _LAYER, layer)
    model.set_experts_implementation(NAME)  # type: ignore[operator]


def _run_remotely(module: nn.Module, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    run_layer: Callable[..., Tensor] | None = getattr(_current, "run_layer", None)
    if run_layer is None:
        raise EngineError("the experts of this model are on other processes: run it inside RemoteExperts.forward_pass")
    return run_layer(getattr(module, _LAYER), hidden_TH, ids_TK, weights_TK)


class ComputeToken:
    """A lock that is handed to whoever has waited longest, and counts the seconds for which it was held.

    While one micro-batch waits for experts, another computes attention. Answers arrive in the order of the requests, so
    the order of (layer, micro-batch) stays the same from layer to layer.
    """

    def __init__(self) -> None:
        """Begin free."""
        self._turn = threading.Condition()
        self._asked = self._served = 0
        self._since = self.busy_seconds = 0.0

    def acquire(self) -> None:
        """Wait for the token."""
        with self._turn:
            ticket = self._asked
            self._asked += 1
            self._turn.wait_for(lambda: self._served == ticket)
            self._since = time.perf_counter()

    def release(self) -> None:
        """Hand the token to the one that has waited longest."""
        with self._turn:
            self.busy_seconds += time.perf_counter() - self._since
            self._served += 1
            self._turn.notify_all()
