"""A stand-in of verl: functions with the names and arguments of its own, and batches as its engine gets them."""

from types import ModuleType, SimpleNamespace

import numpy as np
import torch


def dealt(samples, micro_batches):
    return [list(range(m * samples // micro_batches, (m + 1) * samples // micro_batches)) for m in range(micro_batches)]


class Batch(dict):
    """A batch as verl's engine gets it: nested tensors, and settings."""

    def take(self, places):
        nested = {
            key: [list(value.unbind())[s] for s in places] for key, value in self.items() if torch.is_tensor(value)
        }
        return Batch(
            self, **{key: torch.nested.nested_tensor(rows, layout=torch.jagged) for key, rows in nested.items()}
        )


def make_batch(lengths, routes, **settings):
    values = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 1000, "enable_routing_replay": True, **settings}
    ids = torch.nested.nested_tensor([torch.full((n,), s) for s, n in enumerate(lengths)], layout=torch.jagged)
    if routes is None:
        return Batch(values, input_ids=ids)
    rows = [torch.from_numpy(one.astype(np.int16)) for one in routes]
    return Batch(values, input_ids=ids, routed_experts=torch.nested.nested_tensor(rows, layout=torch.jagged))


def stand_in():
    """Return a Megatron engine and the modules of verl around it; `engine.cut(data)` is a training pass."""
    megatron = ModuleType("verl.workers.engine.megatron.transformer_impl")

    def prepare_micro_batches(
        data,
        dp_group=None,
        num_batches_divided_by=None,
        same_micro_num_in_dp=True,
        min_num_micro_batch=None,
        use_dynamic_bsz_balance=True,
    ):
        indices = dealt(len(data["input_ids"].unbind()), 4)
        return [data.take(one) for one in indices], indices if data["use_dynamic_bsz"] else None

    class MegatronEngine:
        enable_routing_replay = True
        engine_config = SimpleNamespace(expert_model_parallel_size=4, router_replay=SimpleNamespace(mode="R3"))
        tf_config = SimpleNamespace(
            num_moe_experts=16,
            hidden_size=64,
            moe_ffn_hidden_size=64,
            num_layers=3,
            num_attention_heads=2,
            kv_channels=8,
        )

        def forward_backward_batch(self, data, loss_function, forward_only=False):  # noqa: ARG002
            return megatron.prepare_micro_batches(data=data, dp_group=None)

        def cut(self, data, *, forward_only=False):
            return self.forward_backward_batch(data, None, forward_only=forward_only)

    megatron.prepare_micro_batches, megatron.MegatronEngine = prepare_micro_batches, MegatronEngine
    tensors = ModuleType("verl.utils.tensordict_utils")
    tensors.get_non_tensor_data = lambda data, key, default: data.get(key, default)
    tensors.index_select_tensor_dict = lambda data, places: data.take(places)
    packages = [ModuleType(name) for name in ("verl", "verl.workers", "verl.workers.engine")]
    return MegatronEngine(), {module.__name__: module for module in (*packages, megatron, tensors)}
