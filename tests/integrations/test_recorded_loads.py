"""Loads from routes as trainers hold them, and where Megatron puts the experts."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relibra.errors import ConfigError, TraceError
from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.hooks import WarnOnce
from relibra.integrations.repacking import count_samples, of_used_layers

QWEN = {
    "hidden_size": 2048,
    "moe_ffn_hidden_size": 768,
    "num_layers": 48,
    "num_attention_heads": 32,
    "kv_channels": 128,
}


def megatron(**sizes):
    """Arguments of Megatron for Qwen3-30B-A3B."""
    return SimpleNamespace(**QWEN, num_experts=128, **sizes)


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "expert_tensor", "data", "group"),
    [
        (1, 1, 8, 1, 8, 8),  # all ranks of a node feed the same experts
        (1, 1, 8, 1, 32, 8),  # four such groups
        (4, 1, 8, 1, 2, 2),  # slime's recipe for this model on a node: TP 4, EP 8
        (2, 2, 8, 1, 4, 2),
        (4, 1, 8, 4, 8, 8),  # experts divided among four ranks each
        (4, 1, 8, None, 8, 8),  # Megatron's default: as many as the tensor-parallel size
        (8, 1, 4, 1, 4, 1),  # one sample's rows go to two groups
    ],
)
def test_data_parallel_ranks_that_share_experts(tensor, context, expert, expert_tensor, data, group):
    layout = ExpertLayout.of_megatron(
        megatron(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        ),
        data_ranks=data,
    )
    assert (layout.group_ranks, layout.expert_ranks) == (group, expert)


@pytest.mark.parametrize(
    ("sizes", "data", "words"),
    [
        ({"expert_model_parallel_size": 1}, 8, "no schedule"),
        ({"expert_model_parallel_size": 3}, 3, "128 experts"),
        ({"expert_model_parallel_size": 8}, 6, "6 data-parallel ranks"),
        (
            {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 3, "expert_tensor_parallel_size": 1},
            8,
            "4 ranks",
        ),
    ],
)
def test_layouts_that_no_schedule_helps_are_refused(sizes, data, words):
    with pytest.raises(ConfigError, match=words):
        ExpertLayout.of_megatron(megatron(**sizes), data_ranks=data)
    with pytest.raises(ConfigError, match="no experts"):
        ExpertLayout.of_megatron(SimpleNamespace(num_experts=None), data_ranks=data)


def test_attention_is_priced_in_token_slots():
    """4,096 tokens of Qwen3-30B-A3B on one rank, by hand: projections 2 x 4 H^2 each, scores 4 x 4,096 per pair."""
    layout = ExpertLayout.of_megatron(megatron(expert_model_parallel_size=8), data_ranks=8)
    n = 4096
    flops = 48 * (2 * 4 * 2048**2 * n + 4 * 4096 * n * (n + 1) / 2)
    assert layout.attention_prices(np.array([n])) == pytest.approx([flops / (6 * 2048 * 768)])
    halves = megatron(expert_model_parallel_size=8, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    divided = ExpertLayout.of_megatron(halves, data_ranks=4)
    assert divided.attention_prices(np.array([n])) * 2 == pytest.approx(layout.attention_prices(np.array([n])))


def draw_routes(rng, tokens, layers=4, choices=2, experts=8):
    return np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :choices].astype(np.int32)


def test_counts_are_those_by_hand():
    rng = np.random.default_rng(0)
    length_S = np.array([5, 9, 3])
    routes = [draw_routes(rng, n - last) for n, last in zip(length_S, (1, 0, 1), strict=True)]
    for ids in routes:
        ids[:, 0] = 0  # a dense layer, as SGLang and vLLM return it
    share_SLR, used_L = count_samples(routes, length_S, num_experts=8, num_ranks=4)
    assert used_L.tolist() == [False, True, True, True]
    for s, ids in enumerate(routes):
        for layer in range(1, 4):
            assert share_SLR[s, layer].tolist() == np.bincount(ids[:, layer].ravel() // 2, minlength=4).tolist()
    assert of_used_layers(share_SLR, used_L).shape == (3, 3, 4)


def test_rows_without_a_route_are_not_counted():
    ids = draw_routes(np.random.default_rng(1), 6)
    share_SLR, _ = count_samples([ids[:4]], np.array([4]), num_experts=8, num_ranks=2)
    ids[4], ids[5] = -1, 0  # miles marks rows with -1, verl fills with zeros
    filled_SLR, _ = count_samples([ids], np.array([6]), num_experts=8, num_ranks=2)
    assert np.array_equal(share_SLR, filled_SLR)


@pytest.mark.parametrize("filler", [-1, 8])
def test_an_id_of_no_expert_is_named_with_its_place(filler):
    routes = [draw_routes(np.random.default_rng(s), 6) for s in range(3)]
    routes[1][4] = -1  # a row without a route
    routes[2][3, 2, 1] = filler
    ids = routes[2][3, 2].tolist()
    with pytest.raises(TraceError) as raised:
        count_samples(routes, np.array([6, 6, 6]), num_experts=8, num_ranks=2)
    assert f"sample 2 has the expert ids {ids} at position 3 in layer 2" in str(raised.value)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([None], "no routes"),
        ([np.zeros((4, 2), np.int32)], "shape"),
        ([np.zeros((4, 2, 2), np.float32)], "float32"),
        ([np.zeros((2, 2, 2), np.int32)], "2 rows for 4 tokens"),
        ([np.full((4, 2, 2), 9, np.int32)], "8 experts"),
        ([np.zeros((4, 2, 2), np.int32)] * 2, "1 samples are scheduled, and 2"),
        ([], "1 samples are scheduled, and 0"),
    ],
)
def test_routes_of_something_else_are_refused(routes, words):
    with pytest.raises(TraceError, match=words):
        count_samples(routes, np.array([4]), num_experts=8, num_ranks=2)


def test_a_capture_of_nothing_is_refused():
    share_SLR, used_L = count_samples([np.zeros((4, 2, 2), np.int32)], np.array([4]), num_experts=8, num_ranks=2)
    with pytest.raises(TraceError, match="captured nothing"):
        of_used_layers(share_SLR, used_L)


def test_routes_that_numpy_cannot_read_are_one_sentence():
    with pytest.raises(TraceError, match="sample 0 has routes that are no array of numpy"):
        count_samples([torch.zeros(3, 2, 2, dtype=torch.bfloat16)], np.array([3]), num_experts=4, num_ranks=2)


def test_a_reason_is_said_once_whatever_its_numbers(caplog):
    once = WarnOnce(logging.getLogger("relibra.test"), "used as they are")
    for reason in ("sample 3 has 1,024 rows", "sample 17 has 5 rows", "no routes"):
        once.warn(reason)
    assert [record.getMessage() for record in caplog.records] == [
        "relibra: used as they are: sample 3 has 1,024 rows",
        "relibra: used as they are: no routes",
    ]
