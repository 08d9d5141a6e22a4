"""The recipe of the guide, record a batch and replay it, on tiny models of many families."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from relibra.errors import EngineError, TraceError
from relibra.replay import BatchRoutes, record_routing, replay_routing
from relibra.routing.trace import RoutingTrace, hash_tokens
from tests.replay.model_zoo import CAUSAL_MODELS, tiny_causal_model
from tests.replay.tiny_models import random_tokens, tiny_model

GUIDE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
DENSE_FIRST = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Ernie4_5_MoeForCausalLM", "Lfm2MoeForCausalLM")


def batch():
    ids_BN = random_tokens(2, 7)
    mask_BN = torch.ones_like(ids_BN)
    mask_BN[0, :2] = 0
    return ids_BN, mask_BN


def run_recipe(model):
    """Run the block of the guide on a model; return its names."""
    [recipe] = re.findall(r"```python\n(with record_routing.*?)```", GUIDE, flags=re.DOTALL)
    input_ids, attention_mask = batch()
    names = {"record_routing": record_routing, "replay_routing": replay_routing, "BatchRoutes": BatchRoutes}
    names |= {"model": model, "input_ids": input_ids, "attention_mask": attention_mask}
    exec(recipe, names)
    return names


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DENSE_FIRST)) for name in CAUSAL_MODELS]
)
def test_the_recipe_of_the_guide_works(name):
    names = run_recipe(tiny_causal_model(name))
    trace = names["trace"]
    assert names["replay"].disagreement == 0
    assert trace.num_rows == int(names["attention_mask"].sum())
    if name in DENSE_FIRST:
        assert trace.layer_ids[0] > 0


def test_a_trace_has_the_rows_of_the_tokens_that_are_no_padding():
    model, (ids_BN, mask_BN) = tiny_model("deepseek_v3"), batch()
    with torch.no_grad(), record_routing(model) as recorder:
        for row in range(2):
            model(ids_BN[row : row + 1], attention_mask=mask_BN[row : row + 1])
        one = recorder.take_trace(ids_BN, mask_BN, weight_version=3, source="mine")
        model(ids_BN[:1], attention_mask=mask_BN[:1])
        [again] = recorder.take()
    assert one.layer_ids.tolist() == [1, 2]
    assert one.rows_per_sample.tolist() == [5, 7]
    assert np.array_equal(one.experts_TLK[:5], again.numpy()[2:])
    assert np.array_equal(one.token_hash_T[:5], hash_tokens(ids_BN[0, 2:].numpy()))
    assert (one.source, one.weight_versions.tolist()) == ("mine", [3, 3])


def test_another_number_of_tokens_is_told_and_nothing_is_lost():
    model, (ids_BN, _) = tiny_model(), batch()
    with torch.no_grad(), record_routing(model) as recorder:
        with pytest.raises(TraceError, match="0 forward passes of 0 tokens were recorded, and the batch has 2 x 7"):
            recorder.take_trace(ids_BN)
        model(ids_BN)
        with pytest.raises(TraceError, match="1 forward passes of 14 tokens were recorded, and the batch has 2 x 6"):
            recorder.take_trace(ids_BN[:, 1:])
        assert recorder.take_trace(ids_BN).num_rows == 14
        model.model.layers[0].mlp(torch.randn(1, 3, 32))
        with pytest.raises(EngineError, match="1 of 3 routers"):
            recorder.take_trace(ids_BN)


def test_routes_without_layer_ids_are_refused():
    model, (ids_BN, mask_BN) = tiny_model("deepseek_v3"), batch()
    with torch.no_grad(), record_routing(model) as recorder:
        model(ids_BN)
    [routes] = recorder.take()
    trace = RoutingTrace.from_samples(list(routes.view(2, 7, 2, 3).numpy()), num_experts=8)
    said = r"layers \[0, 1\], the model has MoE layers \[1, 2\].*from_samples\(..., layer_ids=\[1, 2\]\), or take_trace"
    with (
        pytest.raises(TraceError, match=said),
        replay_routing(model, BatchRoutes.padded(trace, torch.ones_like(mask_BN))),
    ):
        pass
