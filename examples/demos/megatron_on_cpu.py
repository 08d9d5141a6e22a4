"""`run_on_cpu`: let the parts of Megatron-core that plans use run on a CPU over gloo, to try and to test.

Megatron-core 0.19 asks CUDA for streams, devices and random states, also where tensors are on the host. Here it gets
answers that do nothing. Layers, models, replay, recomputation, tensor and pipeline parallelism then run; its
optimizers, Transformer Engine, context parallelism and the flex dispatchers need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from relibra.errors import EngineError


class _Stream:
    """A stream, or an event, that has nothing to do."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        """Take what CUDA's take."""

    def wait_stream(self, *_: object) -> None:
        """Return at once."""

    wait_event = record = synchronize = wait_stream

    def record_event(self, *_: object) -> _Stream:
        """Return an event that has passed."""
        return self


class _HostTorch:
    """The torch that Megatron's pipeline schedules see: they name the device "cuda" where they count tokens."""

    def __getattr__(self, name: str) -> Any:
        """Return torch's own."""
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: object = None, **options: Any) -> torch.Tensor:
        """Return zeros on the host."""
        del device
        return torch.zeros(*sizes, **options)


def run_on_cpu() -> None:
    """Replace what Megatron-core asks of CUDA in this process; once, before a model is built.

    Models need `use_cpu_initialization=True`, the local layer spec (no Transformer Engine), `moe_grouped_gemm=False`,
    and no fusions of biases, masked softmax or gradient accumulation.

    raises   EngineError where CUDA is available: a process of a GPU must keep its streams
    """
    if torch.cuda.is_available():
        raise EngineError("CUDA is available in this process: run_on_cpu would take its streams away; leave it out")
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda *_: nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.set_stream = cuda.synchronize = lambda *_: None
    cuda.current_device = lambda: "cpu"

    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random.CudaRNGStatesTracker.fork = _keep_states
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: None
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    schedules.torch = _HostTorch()


@contextmanager
def _keep_states(_tracker: Any, *_: object) -> Iterator[None]:
    yield


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the tensor, which is on the host: sizes of an exchange as numpy, as from a GPU."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
