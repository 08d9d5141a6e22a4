"""Estimated and measured memory of a training step by phase. On CPU processes, or on one GPU.

    relibra bench memory                               # two or four gloo processes, a ledger around real tensors
    relibra bench memory --device cuda --layers 3      # one GPU, torch.cuda.max_memory_allocated; writes no rows

The GPU runs Qwen3-30B-A3B's widths with random weights, of which three layers need some 60 GiB on one rank. `--estimate
FILE` takes the figures of `--write-estimate FILE`, which needs no GPU, for a machine where dry runs are too slow.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.spawn import spawn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from relibra.calibration.machine import find_cluster
from relibra.replay.routers import RouterSite, find_routers
from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.memory.estimate import GIB, Estimate
from relibra.rl.memory.estimator import DeviceMemory, estimate_memory
from relibra.rl.memory.ledger import Ledger
from relibra.rl.memory.made_up_step import make_up_step
from relibra.rl.memory.step_run import StepRun
from relibra.rl.memory.worker import model_config_of
from relibra.rl.model import host_adamw, host_weights
from relibra.rl.model.local_shards import local_shard
from relibra.rl.model.policy import read_structure
from relibra.rl.run.ranks import connect_ranks, joined_ranks
from relibra.rl.toy.model import built_in_config

TOY = (
    *("model.hidden_size=768", "model.expert_width=512", "model.num_layers=4", "model.num_experts=16"),
    *("model.experts_per_token=4", "rollout.max_prompt=64", "rollout.max_response=449", "parallel.ranks=2"),
    *(
        "update.micro_batch_tokens=2048",
        "plan.cluster=h100x8",
        "plan.memory_gib=0",
        "plan.slots=2",
        "model.dtype=bfloat16",
    ),
)
CASES: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "every expert at home": ("plan.balancer=static",),
    "moments on the host": ("update.offload=moments",),
    "moments of 8 bits": ("update.optimizer=adamw8bit",),
    "LoRA": ("lora.rank=16",),
    "reference": ("algorithm.kl_coefficient=0.001",),
    "critic": ("algorithm.preset=ppo",),
    "kept by plan": ("update.activations=plan",),
    "kept by plan, four ranks": ("update.activations=plan", "parallel.ranks=4"),
}
ROOM = {"kept by plan": 1.3, "kept by plan, four ranks": 1.0}
"""GiB of a device, a tenth of which stays free: not all layers fit."""
TOLERANCE, TOLERANCE_BY_PLAN = 0.01, 0.03
VOCABULARY = 1024
"""Of the model of adapters."""


class TensorMeter(TorchDispatchMode):
    """Counts the storages of real tensors of the CPU, in the ledger of dry runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._away = set[int]()
        self.begin("load")
        resize, storages = torch.UntypedStorage.resize_, torch.UntypedStorage
        replaced: Any = storages

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self.ledger.resized(storage)
            return result

        replaced.resize_ = resize_

    def begin(self, phase: str) -> None:
        """Count what follows to a phase."""
        self.ledger.begin(phase)

    def begin_layers(self) -> None:
        """Count layers of an update to the update."""

    def own(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Count storages to a part; what is on the host stays there."""
        found = [
            one for one in tensors if one is not None and local_shard(one).untyped_storage()._cdata not in self._away
        ]
        self._away |= {one.untyped_storage()._cdata for one in found if part == "host"}
        self.ledger.own(part, found)

    def watch_layers(self, layers: Sequence[nn.Module]) -> None:
        """Need nothing of layers."""

    def loaded(self, model: nn.Module) -> None:
        """Give a model weights, and routers that choose all experts as often, as a dry run has it."""
        write_weights(model)
        for site in find_routers(model):
            site.module.register_forward_hook(partial(_choose_evenly, site))

    def peaks(self) -> dict[str, float]:
        """Return the bytes of each phase at its largest sum, without what a run with GPUs has on the host."""
        on_device = {
            phase: [sum(parts.values()) - parts.get("host", 0) for parts in lines.values()]
            for phase, lines in self.ledger.peaks().items()
        }
        return {phase: float(max(sums)) for phase, sums in on_device.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns."""
        if any(not issubclass(t, nn.Parameter | FakeTensor) and t is not Tensor for t in types):
            return NotImplemented  # DTensor first; it comes back with local tensors
        out = func(*args, **(kwargs or {}))
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            for one in tree_leaves(out):
                # No wrapper, as of what is on its way: its storage has a size, and no memory.
                real = type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"
                if real and not self.ledger.knows(one):
                    self.ledger.see(one, "activations", "")
        return out


class CudaMeter:
    """Reads the largest allocation of each phase from the allocator of a GPU."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._phase = "load"

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self, phase: str) -> None:
        """Count what follows to a phase."""
        torch.cuda.synchronize()
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0.0), float(torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        self._phase = phase

    def begin_layers(self) -> None:
        """Count layers of an update to the update."""

    def own(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Know no parts."""

    def watch_layers(self, layers: Sequence[nn.Module]) -> None:
        """Need nothing of layers."""

    def loaded(self, model: nn.Module) -> None:
        """Give a model weights: those that nobody wrote may be no numbers."""
        write_weights(model)


def _choose_evenly(site: RouterSite, _router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    ids_TK = (torch.arange(output[2].numel()) % site.num_experts).view_as(output[2])
    return (output[0], site.gates(output, ids_TK), ids_TK, *output[3:])


@torch.no_grad()
def write_weights(model: nn.Module) -> None:
    """Fill the parameters of a model with small random numbers."""
    for parameter in model.parameters():
        local_shard(parameter).normal_(0, 0.02)


def measure(config: RunConfig, rank: int, device: torch.device, meter: Any, keep: Sequence[str]) -> None:
    """Make the step of an estimate with real tensors; collective."""
    ranks = config.parallel.ranks
    cluster = find_cluster(config.plan.cluster, torch.device("cpu"), ranks, ranks)
    model_config = model_config_of(config)
    structure = read_structure(model_config, config.model, ranks, config.algorithm.replay)
    vocabulary = model_config.get_text_config().vocab_size
    batch, _ = make_up_step(config, structure, cluster, vocabulary=vocabulary, rank=rank)
    has_copy = config.rollout.engine == "embedded"
    with meter:
        run = StepRun(config, model_config, structure, cluster, device, meter, has_copy=has_copy, keep=keep)
        for optimizer in (run.optimizer, run.critic_optimizer):
            for group in optimizer.param_groups if isinstance(optimizer, AdamW) else ():
                group["fused"] = True  # as on a GPU
        run.steps(batch)


def _cpu_rank(rank: int, config: RunConfig, keep: Sequence[str], port: int, file: str) -> None:
    torch.set_num_threads(1)
    url = f"tcp://127.0.0.1:{port}?rank={rank}&world_size={config.parallel.ranks}"
    device = torch.device("cpu")
    with joined_ranks(120, device, connect_ranks(120, url)):
        meter = TensorMeter()
        for module in (host_adamw, host_weights):
            replaced: Any = module
            replaced.host_memory = partial(_on_the_host, meter, module.host_memory)
        measure(config, rank, device, meter, keep)
        if rank == 0:
            Path(file).write_text(json.dumps(meter.peaks()))


def _on_the_host(meter: TensorMeter, take: Callable[..., Tensor], *sizes: Any) -> Tensor:
    memory = take(*sizes)
    meter.own("host", [memory])
    return memory


def measured_on_cpus(config: RunConfig, keep: Sequence[str]) -> dict[str, float]:
    """Return the bytes of rank 0 of real processes by phase."""
    os.environ["PYTHONHASHSEED"] = "0"  # of these processes, as of the dry run
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, file = free.getsockname()[1], f"{folder}/peaks.json"
        free.close()
        spawn(_cpu_rank, (config, keep, port, file), nprocs=config.parallel.ranks)
        return json.loads(Path(file).read_text())


def measured_on_a_gpu(config: RunConfig, keep: Sequence[str]) -> dict[str, float]:
    """Return the bytes of a GPU by phase, and print what its allocator keeps."""
    device, meter = torch.device("cuda", 0), CudaMeter()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with joined_ranks(600, device, connect_ranks(600, f"tcp://127.0.0.1:{port}?rank=0&world_size=1")):
        measure(config, 0, device, meter, keep)
        meter.begin("")
        reserved = torch.cuda.max_memory_reserved() / GIB
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; reserved at most {reserved:.2f} GiB")
    return meter.peaks


def kept(found: Estimate) -> Sequence[str]:
    """Return what each layer keeps in an estimate; nothing where no plan decides."""
    return found.choice.option_L if found.choice else ()


def compared(found: Estimate, measured: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return estimated and measured bytes of each phase of the step."""
    phases = [one for one in found.peaks if one.phase in measured and one.phase != "rollout"]  # which is no pass here
    return {one.phase: (one.total, measured[one.phase]) for one in phases}


def print_phases(phases: Mapping[str, tuple[float, float]]) -> None:
    """Print a line for each phase."""
    print(f"{'GiB':<16}{'estimated':>10}{'measured':>10}{'difference':>12}")
    for phase, (estimated, measured) in phases.items():
        off = estimated / measured - 1
        print(f"{phase:<16}{estimated / GIB:>10.3f}{measured / GIB:>10.3f}{off:>+12.2%}")


def toy_config(name: str, folder: str) -> RunConfig:
    """Return the run of a case; adapters need a model in a folder: none are trained on random weights."""
    settings = [*TOY, *CASES[name]]
    if name == "LoRA":
        built_in_config(load_config(None, TOY).model, VOCABULARY).save_pretrained(folder)
        settings.append(f"model.path={folder}")
    return load_config(None, settings)


def rows(names: Iterable[str], folder: str) -> Iterable[dict[str, Any]]:
    """Yield a row for each case; a folder is for the model of adapters."""
    for name in names:
        config = toy_config(name, folder)
        room = ROOM[name] * GIB if name in ROOM else None
        found, _ = estimate_memory(config, DeviceMemory(nbytes=room, name=""), whole=True)
        phases = compared(found, measured_on_cpus(config, kept(found)))
        print(f"\n{name} {found.choice or ''}")
        print_phases(phases)
        off = max(abs(measured / estimated - 1) for estimated, measured in phases.values())
        tolerance = TOLERANCE_BY_PLAN if name in ROOM else TOLERANCE
        figures = {f"{phase} GiB": measured / GIB for phase, (_, measured) in phases.items()}
        ratios = {
            f"{phase} measured / estimated": measured / estimated for phase, (estimated, measured) in phases.items()
        }
        yield {
            "case": name, "label": "measured", "seed": 0, "repetitions": 1, "ranks": config.parallel.ranks, "layers": 4,
            **figures, **ratios, "largest difference": off, "at_most": tolerance, "ok": off <= tolerance,
        }  # fmt: skip


def gpu_config(folder: Path, options: argparse.Namespace) -> RunConfig:
    """Return a run of Qwen3-30B-A3B's widths on one rank, with its configuration in a folder."""
    model = Qwen3MoeConfig(
        num_hidden_layers=options.layers, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        head_dim=128, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=40960,
    )  # fmt: skip
    model.save_pretrained(folder)
    prompt = min(256, options.tokens // 8)
    sizes = (
        *(f"model.path={folder}", "parallel.ranks=1", f"rollout.max_prompt={prompt}"),
        *(f"rollout.max_response={options.tokens // 4 - prompt + 1}", f"update.micro_batch_tokens={options.tokens}"),
    )
    return load_config(None, [*sizes, *options.set])


def main() -> int:
    parser = measurement_options(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=3, help="of the model on a GPU")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch on a GPU")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the run on a GPU")
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--write-estimate", type=Path, metavar="FILE", help="estimate the run on a GPU, and stop")
    parser.add_argument("--estimate", type=Path, metavar="FILE", help="take the estimate from a file")
    options = parser.parse_args()
    if options.device == "cpu" and options.write_estimate is None:
        with tempfile.TemporaryDirectory() as folder:
            found = list(rows(options.cases, folder))
        if options.json:
            print(json.dumps(found, indent=1))
        if not options.quick:
            print(write_results("memory", found, folder=options.output), file=sys.stderr)
        return 0 if all(row["ok"] for row in found) else 1
    with tempfile.TemporaryDirectory() as folder:
        config = gpu_config(Path(folder), options)
        if options.estimate:
            estimate = Estimate.from_json(json.loads(options.estimate.read_text()))
        else:
            estimate, _ = estimate_memory(config, DeviceMemory(nbytes=None, name=""), whole=True)
        if options.write_estimate is not None:
            options.write_estimate.write_text(json.dumps(estimate.as_json()))
            return 0
        for one in estimate.peaks:
            parts = ", ".join(f"{part} {nbytes / GIB:.2f}" for part, nbytes in one.parts.items())
            print(f"{one.phase}: {one.total / GIB:.2f} ({parts})")
        print_phases(compared(estimate, measured_on_a_gpu(config, kept(estimate))))
    return 0
