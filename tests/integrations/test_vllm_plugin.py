"""The repairs of the vLLM plug-ins on classes shaped like those of vLLM 0.29; `test_vllm_server.py` has real ones."""

import importlib
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from relibra.integrations.vllm import plugin
from relibra.rl.rollout.served.weight_group import GroupAddress, broadcast_bucket, join_group, layout_of

REPAIRS = (
    plugin.capture_routes,
    plugin.pack_reloaded_experts,
    plugin.keep_seeds_of_pieces,
    plugin.capture_under_compile,
)


class Experts:
    def _select_experts(self, logits):
        return logits.softmax(-1).topk(2).values, logits.topk(2).indices


class Method:
    """Packs only the first time, as vLLM does."""

    moe_kernel = None

    def _setup_kernel(self, layer):
        layer["packed"] = False
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=self)
            self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer):
        layer["packed"], layer["times"] = True, layer.get("times", 0) + 1


class Runner:
    def __init__(self, generators, unfinished):
        self.input_batch = SimpleNamespace(num_reqs=len(unfinished), generators=generators)
        self.discard_request_mask = SimpleNamespace(np=np.array(unfinished))

    def _sample(self):
        return {row: torch.rand(1, generator=one).item() for row, one in self.input_batch.generators.items()}

    def _bookkeeping_sync(self):
        for row in self.discard_request_mask.np.nonzero()[0]:
            if self.input_batch.generators.get(int(row)) is not None:
                raise RuntimeError("CPU Generator does not use offset")
        return sorted(self.input_batch.generators)


class MoERunner:
    _shared_experts = None

    def _select_forward(self):
        return "inlined"


@pytest.fixture
def vllm(monkeypatch):
    """Modules with fresh copies of the classes above; returns what they hold."""
    held = {name: type(name, (), _own(base)) for name, base in CLASSES.items()}
    held["cpu"] = True
    modules = {
        "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: held["cpu"])},
        "model_executor.layers.fused_moe.experts.cpu_moe": {"CPUUnquantizedExperts": held["Experts"]},
        "model_executor.layers.fused_moe.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": held["Method"]},
        "v1.worker.cpu_model_runner": {"CPUModelRunner": held["Runner"]},
        "model_executor.layers.fused_moe.runner.moe_runner": {"MoERunner": held["MoERunner"]},
    }
    names = {"vllm"} | {
        f"vllm.{'.'.join(parts[:end])}" for parts in (one.split(".") for one in modules) for end in range(1, 8)
    }
    for name in sorted(names):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, content in modules.items():
        vars(sys.modules[f"vllm.{name}"]).update(content)
    return held


def _own(base):
    return {name: value for name, value in vars(base).items() if name not in ("__dict__", "__weakref__")}


CLASSES = {"Experts": Experts, "Method": Method, "Runner": Runner, "MoERunner": MoERunner}


def apply_twice():
    for repair in (*REPAIRS, *REPAIRS):  # vLLM loads plug-ins several times in one process
        repair()


def test_experts_are_reported_once_per_selection(vllm):
    apply_twice()
    experts, seen = vllm["Experts"](), []
    assert experts.supports_routing_replay_capture()
    experts._select_experts(torch.randn(3, 8))
    experts.set_capture_fn(seen.append)
    _, ids = experts._select_experts(torch.randn(3, 8))
    assert len(seen) == 1
    assert (seen[0] == ids).all()


def test_reloaded_experts_are_packed_every_time(vllm):
    apply_twice()
    method, layer = vllm["Method"](), {}
    for load in (1, 2, 3):
        method._setup_kernel(layer)
        assert layer == {"packed": True, "times": load}


def test_a_prompt_in_pieces_leaves_its_generator_where_it_was(vllm):
    apply_twice()

    def tokens(pieces):
        """Sample after each piece of a prompt, then twice after its end; return the last two."""
        generators = {0: torch.Generator().manual_seed(7), 1: torch.Generator().manual_seed(8)}
        for _ in range(pieces):
            runner = vllm["Runner"](generators, [True, False])
            runner._sample()
            assert runner._bookkeeping_sync() == [1]
            assert sorted(generators) == [0, 1]
        return [vllm["Runner"](generators, [False, False])._sample()[0] for _ in range(2)]

    assert tokens(0) == tokens(1) == tokens(5)


class Transfer:
    """The base of vLLM's back ends of weight transfer."""

    def __init__(self, config, vllm_config, device, model):
        self.config, self.device, self.model = config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, info):
        return self.init_info_cls(**info)

    def parse_update_info(self, info):
        return self.update_info_cls(**info)


@pytest.fixture
def receiver(vllm, monkeypatch):
    """A worker of a server, and what its model loads."""
    steps, registered = [], {}
    modules = {
        "distributed.weight_transfer.base": {"WeightTransferEngine": Transfer},
        "distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(
                register_engine=lambda name, *where: registered.setdefault(name, where)
            )
        },
        "model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda _: steps.append("start"),
            "finalize_layerwise_reload": lambda _, __: steps.append("finish"),
        },
    }
    for name, content in modules.items():
        parts = f"vllm.{name}".split(".")
        for end in range(2, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        vars(sys.modules[f"vllm.{name}"]).update(content)
    monkeypatch.delitem(sys.modules, "relibra.integrations.vllm.weight_transfer", raising=False)
    plugin.offer_weight_transfer()
    [module, class_name] = registered["relibra"]
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    model = SimpleNamespace(load_weights=lambda bucket: steps.append({name: one.clone() for name, one in bucket}))
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    yield getattr(importlib.import_module(module), class_name)(None, config, torch.device("cpu"), model), steps
    sys.modules.pop("relibra.integrations.vllm.weight_transfer", None)


def test_a_worker_loads_the_buckets_that_the_trainer_sends(receiver):
    worker, steps = receiver
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    address = GroupAddress("gloo", "127.0.0.1", store.port, 2, 1, 10.0)
    bucket = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]

    def work():
        worker.init_transfer_engine(worker.parse_init_info(asdict(address)))
        worker.start_weight_update()
        worker.update_weights(asdict(layout_of(bucket)))
        worker.finish_weight_update()

    with ThreadPoolExecutor() as pool:
        done = pool.submit(work)
        for sent in broadcast_bucket(join_group(store, address, 0), bucket):
            sent.wait()
        done.result(10)
    assert (steps[0], steps[2]) == ("start", "finish")
    assert all(torch.equal(steps[1][name], tensor) for name, tensor in bucket)
    with pytest.raises(RuntimeError, match="no trainer is joined"):
        worker.update_weights(asdict(layout_of(bucket)))


def test_compiled_graphs_call_experts_as_an_operation(vllm, monkeypatch):
    monkeypatch.setattr(
        torch.ops, "vllm", SimpleNamespace(moe_forward="op", moe_forward_shared="shared"), raising=False
    )
    apply_twice()
    runner = vllm["MoERunner"]()
    assert runner._select_forward() == "op"
    runner._shared_experts = object()
    assert runner._select_forward() == "shared"


def test_other_platforms_are_left_alone(vllm):
    vllm["cpu"] = False
    before = {name: dict(vars(vllm[name])) for name in CLASSES}
    apply_twice()
    assert all(dict(vars(vllm[name])) == before[name] for name in CLASSES)


def test_a_version_without_what_is_repaired_is_named(vllm, caplog):
    del vllm["Experts"]._select_experts
    with caplog.at_level(logging.WARNING):
        plugin.capture_routes()
    assert "relibra cannot capture routes in this version of vLLM" in caplog.text
