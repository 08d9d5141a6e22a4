import pytest
import torch

from relibra.errors import EngineError
from relibra.replay import find_routers, record_routing
from relibra.replay.record import narrow_dtype
from tests.replay.tiny_models import CONFIGS, random_tokens, tiny_model


def watch_experts(model):
    """Collect the ids that each experts module is called with: what is executed, not what a router said."""
    calls, handles = {}, []
    for site in find_routers(model):
        block = model.get_submodule(site.name.rpartition(".")[0])
        ids = calls.setdefault(site.layer_id, [])
        handles.append(
            block.experts.register_forward_pre_hook(lambda _, args, ids=ids: ids.append(args[1].detach().clone()))
        )
    return calls, handles


@pytest.mark.parametrize("family", CONFIGS)
def test_records_what_the_experts_execute(family):
    model = tiny_model(family)
    calls, _ = watch_experts(model)
    with record_routing(model) as recorder:
        model(random_tokens(2, 7), use_cache=False)
        model(random_tokens(1, 5), use_cache=False)
    first, second = recorder.take()
    assert recorder.take() == []
    assert (first.shape[0], second.shape[0], first.dtype) == (14, 5, torch.uint8)
    for column, layer_id in enumerate(recorder.layer_ids):
        assert torch.equal(first[:, column].long(), calls[layer_id][0])
        assert torch.equal(second[:, column].long(), calls[layer_id][1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_with_a_cache_records_prompt_and_tokens(mode):
    model = tiny_model().eval()
    model.generation_config.eos_token_id = None
    prompt = random_tokens(2, 4)
    with mode(), record_routing(model) as recorder:
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    prefill, *decode = recorder.take()
    assert [len(routes) for routes in (prefill, *decode)] == [8, 2, 2, 2, 2]
    prefill[0] = prefill[0]  # not an inference tensor, which could not be written to
    rows_BN = torch.cat([prefill.view(2, 4, 3, 2), *(routes.unsqueeze(1) for routes in decode)], dim=1)
    with torch.no_grad(), record_routing(model) as recorder:
        model(whole[:, :-1], use_cache=False)
    [again] = recorder.take()
    assert torch.equal(rows_BN.flatten(0, 1).sort().values, again.sort().values)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_not_recorded(use_reentrant):
    model = tiny_model().train()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    with record_routing(model) as recorder:
        model(random_tokens(2, 6), use_cache=False).logits.sum().backward()
    assert len(recorder.take()) == 1


def test_an_unfinished_forward_pass_is_an_error_and_is_forgotten():
    model = tiny_model()

    def fail(*_):
        raise ValueError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with record_routing(model) as recorder:
        with pytest.raises(ValueError, match="out of memory"):
            model(random_tokens(1, 3))
        with pytest.raises(EngineError, match=r"1 of 3 routers, before model\.layers\.1\.mlp\.gate"):
            recorder.take()
        handle.remove()
        model(random_tokens(1, 3))
        assert len(recorder.take()) == 1
        model.model.layers[0].mlp(torch.randn(1, 3, 32))
        with pytest.raises(EngineError, match=r"layers\.0\.mlp\.gate ran where model\.layers\.1\.mlp\.gate was due"):
            model(random_tokens(1, 3))
    with pytest.raises(EngineError, match="1 of 3 routers"), record_routing(model):
        model.model.layers[0].mlp(torch.randn(1, 3, 32))


def test_a_router_that_computes_other_weights_is_refused():
    model = tiny_model()
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda _m, _a, out: (out[0], out[1] * 0.5, out[2]))
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.gate.*bit for bit"), record_routing(model):
        model(random_tokens(1, 3))


def test_hooks_are_gone_after_the_context():
    model = tiny_model()
    with record_routing(model):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_ids_take_the_narrowest_type():
    assert [narrow_dtype(n) for n in (256, 257, 1 << 15, 1 << 16)] == [
        torch.uint8,
        torch.int16,
        torch.int16,
        torch.int32,
    ]
