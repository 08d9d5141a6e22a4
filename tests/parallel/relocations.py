"""What a rank does while experts move: follow their rows, train, save, be refused, be lost."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from relibra.errors import EngineError
from relibra.parallel import register
from relibra.parallel.balanced import BalancedEP, balanced_layers
from relibra.parallel.homes.home_shards import home_shards
from relibra.parallel.homes.logical_order import logical_order, logical_parameters
from relibra.parallel.homes.relocation import relocate
from tests.replay.tiny_models import random_tokens, tiny_model

NUM_MAPS, NUM_STEPS = 3, 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and how it is spread over ranks."""

    num_ranks: int
    num_experts: int = 8
    ep_size: int = 2
    dp_replicate_size: int = 1
    family: str = "qwen3_moe"

    @property
    def model(self) -> dict[str, int]:
        return {"num_local_experts" if self.family == "gpt_oss" else "num_experts": self.num_experts}

    @property
    def model_name(self) -> str:
        return f"{self.family}-{self.num_experts}"

    @property
    def dense(self) -> nn.Module:
        return tiny_model(self.family, **self.model)

    def maps(self, seed: int) -> np.ndarray:
        """Return a random map for each of the three layers."""
        rng = np.random.default_rng(seed)
        return np.stack([rng.permutation(self.num_experts) for _ in range(3)])

    def load(self, folder: Path) -> nn.Module:
        from transformers import AutoModelForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig

        config = DistributedConfig(
            dp_replicate_size=self.dp_replicate_size,
            fsdp_size=self.num_ranks // self.dp_replicate_size,
            ep_size=self.ep_size,
            ep_implementation="relibra",
        )
        return AutoModelForCausalLM.from_pretrained(
            folder / self.model_name, distributed_config=config, dtype=torch.float32, attn_implementation="eager"
        ).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def backward(model: nn.Module, step: int) -> float:
    ids_BN = random_tokens(2, 8, seed=100 * step + dist.get_rank())
    loss = -model(ids_BN, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids_BN[:, 1:, None]).mean()
    loss.backward()
    return float(loss.detach())


class Experts(nn.Module):
    """As transformers makes them, without the rest of a model."""

    def __init__(self, whole: Tensor, num_here: int) -> None:
        super().__init__()
        self.num_experts = num_here
        self.weight = nn.Parameter(whole)

    def forward(self, rows: Tensor, *_: Tensor) -> Tensor:
        return rows


def swap_where_ranks_hold_no_rows(setting: Setting, folder: Path) -> dict:
    """FSDP has more ranks than experts to share out; transformers loads no checkpoint into such a model."""
    shape = (setting.num_ranks // setting.ep_size, setting.ep_size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep", "tp"))
    whole = torch.arange(setting.num_experts * 3.0).view(setting.num_experts, 3)
    experts = Experts(distribute_tensor(whole, mesh["ep"], [Shard(0)]), setting.num_experts // setting.ep_size)
    layer = BalancedEP(experts, mesh["ep"], mesh["tp"])
    fully_shard(experts, mesh=mesh["efsdp"])
    model = nn.ModuleDict({"layers": nn.ModuleList([experts])})
    optimizer = adamw(model)
    [shard] = home_shards(layer)
    if len(shard.rows):  # as an optimizer does that has nothing to do without rows
        optimizer.state[shard.parameter]["momentum"] = -shard.rows
    wanted_LE = np.arange(setting.num_experts)[None, ::-1].copy()
    relocation = relocate(model, wanted_LE, optimizer)
    momentum = optimizer.state[shard.parameter].get("momentum", torch.zeros(0, 3))
    [(_, logical)] = logical_parameters(model)
    return {
        "relocation": (relocation.experts, relocation.sent_bytes),
        "rows": shard.rows.clone(),
        "momentum": momentum,
        "gathered": shard.parameter.detach().full_tensor(),
        "logical": logical,
        "whole": whole,
    }


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    """List the tensors of all layers that hold a row per expert, by (layer, name)."""
    tensors = {}
    for layer_id, layer in balanced_layers(model).items():
        for shard in home_shards(layer):
            tensors[layer_id, shard.name] = shard.parameter
            if shard.parameter.grad is not None:
                tensors[layer_id, f"{shard.name}.grad"] = shard.parameter.grad
            for key, value in optimizer.state.get(shard.parameter, {}).items():
                if value.ndim:
                    tensors[layer_id, f"{shard.name}.{key}"] = value
    return tensors


def rows_of_experts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[int, str, int], Tensor]:
    """Copy the rows of this rank, by (layer, name, logical expert)."""
    rows = {}
    layers = balanced_layers(model)
    for (layer_id, name), tensor in stored(model, optimizer).items():
        first = home_shards(layers[layer_id])[0].first
        experts = layers[layer_id].physical_to_logical_E[first:].tolist()
        rows |= {(layer_id, name, experts[n]): row.clone() for n, row in enumerate(local(tensor))}
    return rows


def homes(model: nn.Module) -> list[list[int]]:
    return [layer.physical_to_logical_E.tolist() for layer in balanced_layers(model).values()]


def follow_train_save(setting: Setting, folder: Path) -> dict:
    return {
        "followed": follow(setting, folder),
        "trained": train(setting, folder, moving=True),
        "trained at home": train(setting, folder, moving=False),
        "saved": save(setting, folder),
    }


def follow(setting: Setting, folder: Path) -> dict:
    """Move experts several times, with gradients, moments, and states that are plain tensors of other types."""
    model = setting.load(folder)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    for layer in balanced_layers(model).values():
        for shard in home_shards(layer):
            if len(shard.rows):  # as an optimizer does that has nothing to do without rows
                optimizer.state[shard.parameter]["compressed"] = (3 * shard.rows).to(torch.bfloat16)
                optimizer.state[shard.parameter]["flags"] = shard.rows > 0
    objects = stored(model, optimizer)
    places = {key: (id(tensor), local(tensor).data_ptr()) for key, tensor in objects.items()}
    before, after, moved = rows_of_experts(model, optimizer), [], []
    expert_bytes = sum(local(t)[0].nbytes for (layer, _), t in objects.items() if layer == 0 and len(local(t)))
    for seed in range(NUM_MAPS):
        relocation = relocate(model, setting.maps(seed), optimizer)
        moved.append((relocation.experts, relocation.sent_bytes))
        assert homes(model) == setting.maps(seed).tolist()
        after.append(rows_of_experts(model, optimizer))
    one = setting.maps(NUM_MAPS - 1)
    one[1, [0, -1]] = one[1, [-1, 0]]  # the first and the last position of one layer change places
    relocation = relocate(model, one, optimizer)
    again = relocate(model, one, optimizer)
    return {
        "before": before,
        "after": [*after, rows_of_experts(model, optimizer)],
        "same objects": places
        == {key: (id(tensor), local(tensor).data_ptr()) for key, tensor in stored(model, optimizer).items()},
        "moved": moved,
        "expert bytes": expert_bytes,
        "two moved": (relocation.experts, relocation.sent_bytes),
        "none moved": (again.experts, again.sent_bytes),
    }


def train(setting: Setting, folder: Path, *, moving: bool) -> dict:
    """Train some steps; experts move before each, and once between backward pass and optimizer.

    transformers sorts rows by expert in a way that may change the order of the rows of one expert when ids change; in a
    stable order, an expert adds up the same rows in the same order wherever it is at home.
    """
    model = setting.load(folder)
    model.set_experts_implementation("eager")
    optimizer, losses = adamw(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        if moving:
            relocate(model, setting.maps(10 + step), optimizer)
        with mock.patch("torch.argsort", partial(torch.argsort, stable=True)):
            losses.append(backward(model, step))
        if moving and step == 1:
            relocate(model, setting.maps(20), optimizer)
        optimizer.step()
    return {"losses": losses, "parameters": {name: p.clone() for name, p in logical_parameters(model)}}


def save(setting: Setting, folder: Path) -> dict:
    """Save from moved homes; come home to them, also after an error; show parameters in logical order meanwhile."""
    model = setting.load(folder)
    optimizer = adamw(model)
    maps = setting.maps(30)
    relocate(model, maps, optimizer)
    path = folder / f"saved-{setting}"
    with logical_order(model, optimizer):
        inside = homes(model)
        model.save_pretrained(path)
    found = {"path": path, "inside": inside, "back": homes(model) == maps.tolist()}
    with torch.no_grad():
        model(random_tokens(1, 4), use_cache=False)  # leaves the root gathered
    found["parameters"] = {name: p.clone() for name, p in logical_parameters(model)}
    try:
        with logical_order(model, optimizer):
            raise KeyError("inside")
    except KeyError:
        found["back after an error"] = homes(model) == maps.tolist()
    return found


def message_of(action) -> str:
    try:
        action()
    except EngineError as error:
        return str(error)
    return "no error"


def refuse_all(setting: Setting, folder: Path) -> dict[str, str]:
    rank, model = dist.get_rank(), setting.load(folder)
    optimizer, maps = adamw(model), setting.maps(0)
    backward(model, 0)
    optimizer.step()
    before = rows_of_experts(model, optimizer)
    layer, twice = balanced_layers(model)[1], maps.copy()
    twice[1, 0] = twice[1, 1]
    parameter = home_shards(layer)[0].parameter
    state = optimizer.state[parameter]

    def relocate_with_state(name, value):
        state[name] = value
        try:
            relocate(model, maps, optimizer)
        finally:
            del state[name]

    def executing():
        layer.runner = layer.run_at_home
        try:
            relocate(model, maps, optimizer)
        finally:
            layer.runner = None

    def unreduced():
        model.set_requires_gradient_sync(False)
        backward(model, 1)
        model.set_requires_gradient_sync(True)
        relocate(model, maps, optimizer)

    messages = {
        "other shape": lambda: relocate(model, maps[:2], optimizer),
        "no permutation": lambda: relocate(model, twice, optimizer),
        "no permutation on one rank": lambda: relocate(model, twice if rank else maps, optimizer),
        "different maps": lambda: relocate(model, maps if rank else maps[::-1].copy(), optimizer),
        "optimizer on one rank": lambda: relocate(model, maps, optimizer if rank else None),
        "another optimizer": lambda: relocate(model, maps, adamw(nn.Linear(2, 2))),
        "factored state": lambda: relocate_with_state("row", torch.zeros(len(local(parameter)), 1)),
        "nested state": lambda: relocate_with_state("factors", [torch.zeros(1)]),
        "executing": executing,
        "unreduced gradients": unreduced,
    }
    found = {name: message_of(action) for name, action in messages.items()}
    after = rows_of_experts(model, optimizer)
    assert homes(model) == [list(range(setting.num_experts))] * 3
    assert all(torch.equal(before[key], after[key]) for key in before)
    backward(model, 2)  # reduces what waited
    found["afterwards"] = message_of(lambda: relocate(model, maps, optimizer))
    return found


def lose_a_rank(rank: int, setting: Setting, folder: Path, fault: str, timeout_s: float) -> None:
    """Save, then relocate; rank 1 is killed, or stops, in the second layer. Survivors write down what they see."""
    torch.set_num_threads(1)
    register()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for meeting, seconds in (("start", 60.0), ("work", timeout_s)):  # all are there before time is short
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{meeting}",
            rank=rank,
            world_size=setting.num_ranks,
            timeout=timedelta(seconds=seconds),
        )
    model = setting.load(folder)
    optimizer = adamw(model)
    backward(model, 0)
    optimizer.step()
    relocate(model, setting.maps(0), optimizer)
    with logical_order(model, optimizer):
        model.save_pretrained(folder / "checkpoint")
    whole = {name: p.clone() for name, p in logical_parameters(model)}
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    before = rows_of_experts(model, optimizer)
    dist.barrier()
    if rank == 1:
        _arm(fault)
    start = time.monotonic()
    message = message_of(lambda: relocate(model, setting.maps(1), optimizer))
    seconds = time.monotonic() - start
    after = rows_of_experts(model, optimizer)
    kept = [all(torch.equal(before[k], after.get(k, torch.empty(0))) for k in before if k[0] == n) for n in range(3)]
    found = {"message": message, "seconds": seconds, "homes": homes(model), "rows kept": kept}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _arm(fault: str) -> None:
    """Make the second layer's transfer, or the word after it, the end of this process."""
    name = "all_reduce" if fault == "killed before the word" else "all_to_all_single"
    original, calls = getattr(dist, name), []

    def faulty(*args, **kwargs):
        calls.append(name)
        if len(calls) == 2 and fault == "stopped":
            time.sleep(600)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(dist, name, faulty)
