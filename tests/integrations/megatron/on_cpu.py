"""What Megatron-core 0.19 asks of CUDA in its MoE layers, answered on a CPU; docs/guides/megatron.md shows it too."""

from contextlib import contextmanager, nullcontext

import torch


class _Stream:
    """A stream, or an event, that has nothing to do."""

    def __init__(self, *_, **__):
        self.cuda_stream = 0

    def wait_stream(self, *_):
        return None

    wait_event = record = synchronize = wait_stream

    def record_event(self, *_):
        return self


def run_megatron_on_cpu():
    """Make the parts of Megatron-core that planned layers use run without a GPU; idempotent."""
    stream = _Stream()
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: stream
    torch.cuda.set_stream = torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    @contextmanager
    def fork(self, *_):
        yield

    random.CudaRNGStatesTracker.fork = fork
    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None

    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
