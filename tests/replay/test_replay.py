import copy
import math
from dataclasses import astuple

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import EngineError, TraceError
from relibra.replay import BatchRoutes, RouterSite, find_routers, record_routing, replay_routing
from relibra.replay.replay import RouterComparison
from relibra.routing.trace import RoutingTrace
from tests.replay.test_record import watch_experts
from tests.replay.tiny_models import CONFIGS, random_experts, random_tokens, random_trace, tiny_model

FAMILIES = list(CONFIGS)


def other_routes(model, lengths=(7, 7), seed=0):
    """Random routes for a batch without padding, and the trace they come from."""
    sites = find_routers(model)
    trace = random_trace(
        list(lengths),
        layer_ids=[site.layer_id for site in sites],
        num_experts=sites[0].num_experts,
        top_k=sites[0].top_k,
        seed=seed,
    )
    return BatchRoutes.padded(trace, torch.ones(len(lengths), max(lengths))), trace


def policy_loss(model, ids_BN, **inputs):
    """Mean log-probability of the next tokens: the last row of a sample has no part in it."""
    logits = model(ids_BN, use_cache=False, **inputs).logits[:, :-1].float()
    return -logits.log_softmax(-1).gather(-1, ids_BN[:, 1:, None]).mean()


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def checkpointed(request):
    """Return a model that recomputes its layers, routes for it, and tokens."""
    model = tiny_model().train()
    model.activation_checkpointing_enable({"use_reentrant": request.param})
    return model, other_routes(model)[0], random_tokens(2, 7)


def assert_refused(model, routes, message, **options):
    with pytest.raises(TraceError, match=message), replay_routing(model, routes, **options):
        pass


def backward_twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_routes_replay_to_the_same_bits(family, dtype):
    model = tiny_model(family, dtype=dtype)
    ids_BN = random_tokens(2, 7)
    with record_routing(model) as recorder:
        native = model(ids_BN, use_cache=False).logits
    [routes_TLK] = recorder.take()
    trace = RoutingTrace.from_samples(
        list(routes_TLK.unflatten(0, (2, 7)).numpy()),
        num_experts=recorder.num_experts,
        layer_ids=recorder.layer_ids,
        tokens=list(ids_BN.numpy()),
    )
    with replay_routing(model, BatchRoutes.padded(trace, torch.ones_like(ids_BN), ids_BN)) as replay:
        replayed = model(ids_BN, use_cache=False).logits
    assert torch.equal(native, replayed)
    assert replay.disagreement == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_routes_train_the_router_rows_of_their_experts(family):
    model = tiny_model(family)
    ids_BN = random_tokens(2, 7)
    routes, _ = other_routes(model)
    calls, handles = watch_experts(model)
    policy_loss(model, ids_BN)
    native = {layer: seen.pop() for layer, seen in calls.items()}
    with replay_routing(model, routes) as replay:
        policy_loss(model, ids_BN).backward()
    for column, site in enumerate(find_routers(model)):
        [executed_TK] = calls[site.layer_id]
        assert torch.equal(executed_TK[routes.valid_T], routes.experts_TLK[routes.valid_T, column].long())
        assert not routes.valid_T[6]
        assert not routes.valid_T[13]
        used = executed_TK[routes.valid_T].unique()
        assert (site.module.weight.grad[used].abs().sum(1) > 0).all()
    assert 0.5 < replay.disagreement <= 1.0
    first = find_routers(model)[0].layer_id  # later layers see other hidden states, so only this one is comparable
    differ_T = (native[first].sort().values != calls[first][0].sort().values).any(1)
    assert differ_T[routes.valid_T].any()
    for handle in handles:
        handle.remove()


@settings(max_examples=8)
@given(st.integers(0, 1 << 32))
def test_comparison_counts_pairs_rows_and_choices_that_differ(seed):
    """Against a slow count; a hook that was there before sees what each router chose by itself."""
    model = tiny_model()
    routes, _ = other_routes(model, seed=seed)
    native = []
    for site in find_routers(model):
        site.module.register_forward_hook(lambda *call: native.append(call[2][2].clone()))
    with replay_routing(model, routes) as replay, torch.no_grad():
        assert replay.comparison() == RouterComparison()
        assert math.isnan(replay.disagreement)
        model(random_tokens(2, 7, seed % 1000), use_cache=False)
    valid = np.flatnonzero(routes.valid_T.numpy())
    missed = [
        [len(set(routes.experts_TLK[t, layer].tolist()) - set(native[layer][t].tolist())) for layer in range(3)]
        for t in valid
    ]
    pairs = 3 * len(valid)
    differing = sum(m > 0 for row in missed for m in row)
    rows, choices = sum(any(row) for row in missed), sum(map(sum, missed))
    found = replay.comparison()
    assert found == RouterComparison(len(valid), pairs, 2 * pairs, differing, rows, choices)
    assert replay.disagreement == differing / pairs
    assert found + found == RouterComparison(*(2 * count for count in astuple(found)))


@pytest.mark.parametrize("left", [True, False])
def test_padding_on_either_side_gives_the_packed_loss(left):
    model = tiny_model()
    lengths = [7, 4]
    tokens = [random_tokens(1, n, seed=n)[0] for n in lengths]
    trace = random_trace(lengths, layer_ids=[0, 1, 2], tokens=[t.numpy() for t in tokens])
    mask_BN, ids_BN = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)
    for b, sample in enumerate(tokens):
        place = slice(7 - len(sample), 7) if left else slice(0, len(sample))
        mask_BN[b, place], ids_BN[b, place] = 1, sample
    position_BN = (mask_BN.cumsum(1) - 1).clamp(min=0)
    with replay_routing(model, BatchRoutes.padded(trace, mask_BN, ids_BN)):
        padded = model(ids_BN, attention_mask=mask_BN, position_ids=position_BN, use_cache=False).logits
    packed_ids = torch.cat(tokens).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    with replay_routing(model, BatchRoutes.packed(trace, input_ids_T=packed_ids)):
        packed = model(packed_ids, position_ids=positions, use_cache=False).logits[0]
    torch.testing.assert_close(padded[mask_BN.bool()], packed, rtol=1e-5, atol=1e-5)
    alone = BatchRoutes.packed(trace.select([1]), input_ids_T=tokens[1])
    with replay_routing(model, alone):
        single = model(tokens[1].unsqueeze(0), use_cache=False).logits[0]
    torch.testing.assert_close(packed[7:], single, rtol=1e-5, atol=1e-5)


def test_the_filler_of_the_last_row_changes_nothing():
    model = tiny_model()
    ids_BN = random_tokens(2, 7)
    _, trace = other_routes(model)
    results = []
    for filler in ([0, 0], [7, 3]):
        experts_TLK = trace.experts_TLK.copy()
        experts_TLK[~trace.valid_T] = filler
        routes = BatchRoutes.padded(RoutingTrace(**{**vars(trace), "experts_TLK": experts_TLK}), torch.ones(2, 7))
        model.zero_grad()
        with replay_routing(model, routes), record_routing(model) as recorder:
            loss = policy_loss(model, ids_BN)
            loss.backward()
        results.append((loss.detach(), gradients(model), recorder.take()[0].long().flatten().bincount()))
    (loss, grads, load_E), (other_loss, other_grads, other_load_E) = results
    assert torch.equal(loss, other_loss)
    assert torch.equal(load_E, other_load_E)
    assert all(torch.equal(grads[name], other_grads[name]) for name in grads)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_activation_checkpointing_gives_the_same_gradients(family, use_reentrant):
    model = tiny_model(family).train()
    ids_BN = random_tokens(2, 7)
    routes, _ = other_routes(model)
    with replay_routing(model, routes):
        policy_loss(model, ids_BN).backward()
    wanted = gradients(model)
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    calls, _ = watch_experts(model)
    with replay_routing(model, routes):
        policy_loss(model, ids_BN).backward()
    for layer, seen in calls.items():
        assert len(seen) == 2, layer
        assert torch.equal(*seen)
    got = gradients(model)
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-7)


def test_checkpointing_every_second_layer_is_consumed_cleanly():
    model = tiny_model().train()
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    routes, _ = other_routes(model)
    with replay_routing(model, routes):
        policy_loss(model, random_tokens(2, 7)).backward()
    assert not any(site.module._forward_pre_hooks for site in find_routers(model))


def test_forward_and_backward_may_be_two_contexts(checkpointed):
    model, _, _ = checkpointed
    batches = [(random_tokens(2, 7, seed), other_routes(model, seed=seed)[0]) for seed in (1, 2)]
    for ids_BN, routes in batches:
        with replay_routing(model, routes):
            policy_loss(model, ids_BN).backward()
    wanted = gradients(model)
    model.zero_grad()
    losses = []
    for ids_BN, routes in batches:
        with replay_routing(model, routes):
            losses.append(policy_loss(model, ids_BN))
    for loss, (_, routes) in zip(losses, batches, strict=True):
        with replay_routing(model, routes):
            loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-6)
    assert not any(site.module._forward_pre_hooks for site in find_routers(model))


def test_backward_in_a_context_of_its_own_needs_no_checkpointing():
    model = tiny_model()
    routes, _ = other_routes(model)
    with replay_routing(model, routes):
        loss = policy_loss(model, random_tokens(2, 7))
    with replay_routing(model, routes):
        loss.backward()


def test_several_passes_in_flight_are_not_confused(checkpointed):
    model, routes, ids_BN = checkpointed
    other, _ = other_routes(model, seed=2)

    def two_losses():
        losses = []
        for each in (routes, other):
            with replay_routing(model, each):
                losses.append(policy_loss(model, ids_BN))
        return losses

    for loss in (two_losses()[0], sum(two_losses())):
        with pytest.raises(EngineError, match="active replay is over other routes"), replay_routing(model, other):
            loss.backward()
    native = policy_loss(model, ids_BN)
    with pytest.raises(EngineError, match="did not replay the routes of this context"), replay_routing(model, routes):
        native.backward()


def test_a_replay_without_backward_leaves_training_alone(checkpointed):
    model, routes, ids_BN = checkpointed
    policy_loss(model, ids_BN).backward()
    wanted = gradients(model)
    with pytest.raises(ZeroDivisionError), replay_routing(model, routes):
        1 / policy_loss(model, ids_BN).detach().mul(0).int().item()
    with replay_routing(model, routes):
        kept = policy_loss(model, ids_BN)
    model.zero_grad()
    policy_loss(model, ids_BN).backward()
    assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(model).items())
    with pytest.raises(EngineError, match="no replay is active"):
        kept.backward()


def test_a_replay_without_gradients_leaves_training_alone(checkpointed):
    model, routes, ids_BN = checkpointed
    model.eval()  # torch warns when a reentrant checkpoint runs without gradients
    with replay_routing(model, routes), torch.no_grad():
        policy_loss(model, ids_BN)
    model.train()
    policy_loss(model, ids_BN).backward()
    with replay_routing(model, routes):
        policy_loss(model, ids_BN).backward()
    policy_loss(model, ids_BN).backward()


def test_routes_are_consumed_once():
    model = tiny_model().train()
    routes, _ = other_routes(model)
    ids_BN = random_tokens(2, 7)
    with (
        pytest.raises(TraceError, match="layer 0: its routes were used by 2 forward passes"),
        replay_routing(model, routes),
    ):
        sum(policy_loss(model, ids_BN) for _ in range(2))
    with (
        pytest.raises(TraceError, match=r"layer 1: its routes were used by 0 forward passes \(layer 0: 1\)"),
        replay_routing(model, routes),
    ):
        model.model.layers[0].mlp(torch.randn(2, 7, 32))
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(TraceError, match="and 2 recomputations"), replay_routing(model, routes):
        backward_twice(policy_loss(model, ids_BN))


@pytest.mark.parametrize("replayed_before", [True, False])
def test_a_context_in_which_no_router_ran_is_an_error(replayed_before):
    model = tiny_model()
    routes, _ = other_routes(model)
    ids_BN = random_tokens(2, 7)
    if replayed_before:
        with replay_routing(model, routes):
            policy_loss(model, ids_BN)
    with pytest.raises(TraceError, match="0 forward passes and 0 recomputations"), replay_routing(model, routes):
        policy_loss(copy.deepcopy(model) if replayed_before else tiny_model(), ids_BN).backward()
    assert_refused(model, routes, "0 forward passes and 0 recomputations")


@pytest.mark.skipif(not torch._dynamo.is_dynamo_supported(), reason="torch.compile does not work here")
@pytest.mark.filterwarnings("ignore")  # torch warns about its own parts
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", ["native", "replay"])
def test_a_compiled_model_is_replayed_or_refused(backend, first, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # torch cannot trace the shape checker
    torch._dynamo.reset()
    model = tiny_model(num_hidden_layers=2)
    ids_BN = random_tokens(2, 7)
    batches = [other_routes(model, seed=seed)[0] for seed in (1, 2)]
    native, wanted = model(ids_BN, use_cache=False).logits, []
    for routes in batches:
        with replay_routing(model, routes):
            wanted.append(model(ids_BN, use_cache=False).logits)
    compiled = torch.compile(model, backend=backend)
    if first == "native":
        compiled(ids_BN, use_cache=False)
    for routes, logits in zip(batches, wanted, strict=True):
        if first == "native":  # it keeps the code that was traced without hooks
            with pytest.raises(TraceError, match="nothing was replayed"), replay_routing(model, routes):
                compiled(ids_BN, use_cache=False)
        else:
            with replay_routing(model, routes) as replay:
                torch.testing.assert_close(compiled(ids_BN, use_cache=False).logits, logits)
            assert replay.disagreement > 0.5
    torch.testing.assert_close(compiled(ids_BN, use_cache=False).logits, native)


def test_nothing_is_left_of_a_replay():
    model = tiny_model()
    ids_BN = random_tokens(2, 7)
    native = model(ids_BN, use_cache=False).logits
    routes, _ = other_routes(model)
    with replay_routing(model, routes):
        replayed = model(ids_BN, use_cache=False).logits
    assert not torch.equal(native, replayed)
    assert torch.equal(native, model(ids_BN, use_cache=False).logits)
    with pytest.raises(ZeroDivisionError), replay_routing(model, routes):
        raise ZeroDivisionError
    assert torch.equal(native, model(ids_BN, use_cache=False).logits)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_two_models_in_one_process_do_not_meet():
    actor, reference = tiny_model(seed=1), tiny_model(seed=2)
    ids_BN = random_tokens(2, 7)
    native = reference(ids_BN, use_cache=False).logits
    (routes, _), (other, _) = other_routes(actor, seed=1), other_routes(reference, seed=5)
    with replay_routing(actor, routes):
        alone = actor(ids_BN, use_cache=False).logits
    with replay_routing(actor, routes):
        assert torch.equal(reference(ids_BN, use_cache=False).logits, native)
        with replay_routing(reference, other):
            reference(ids_BN, use_cache=False)
            assert torch.equal(actor(ids_BN, use_cache=False).logits, alone)


def test_a_replay_inside_a_replay_is_refused():
    model = tiny_model()
    routes, _ = other_routes(model)
    ids_BN = random_tokens(2, 7)
    with replay_routing(model, routes):
        with pytest.raises(EngineError, match="replaying already"), replay_routing(model, routes):
            pass
        outer = model(ids_BN, use_cache=False).logits
    with replay_routing(model, routes):
        assert torch.equal(model(ids_BN, use_cache=False).logits, outer)


def test_a_deep_copy_before_the_backward_pass_is_replayed():
    model = tiny_model().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    routes, _ = other_routes(model)
    with replay_routing(model, routes):
        policy_loss(model, random_tokens(2, 7))
    twin = copy.deepcopy(model)
    with replay_routing(twin, routes):
        policy_loss(twin, random_tokens(2, 7)).backward()


def test_a_sample_with_lost_rows_runs_native_as_a_whole():
    model = tiny_model()
    ids_BN = random_tokens(2, 7)
    _, trace = other_routes(model)
    valid_T = trace.valid_T.copy()
    valid_T[2] = False
    routes = BatchRoutes.padded(RoutingTrace(**{**vars(trace), "valid_T": valid_T}), torch.ones(2, 7))
    assert routes.fallback_samples == (0,)
    assert routes.coverage == 6 / 12
    native = model(ids_BN, use_cache=False).logits
    with replay_routing(model, routes):
        replayed = model(ids_BN, use_cache=False).logits
    torch.testing.assert_close(replayed[0], native[0], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(replayed[1], native[1], atol=1e-3)


def test_routes_of_all_decoder_layers_are_narrowed_on_import():
    model = tiny_model("glm4_moe")
    experts = random_experts(7, 3, 8, 3)
    whole = BatchRoutes.packed(RoutingTrace.from_samples([experts], num_experts=8))
    assert_refused(model, whole, r"extra \[0\]; drop the dense layers .*layer_ids=range\(N\), moe_layers=\[1, 2\]")
    experts[:, 0] = 0  # what engines report for a dense layer
    trace = RoutingTrace.from_samples([experts], num_experts=8, layer_ids=range(3), moe_layers=[1, 2])
    calls, _ = watch_experts(model)
    with replay_routing(model, BatchRoutes.packed(trace)):
        model(random_tokens(1, 7), use_cache=False)
    for layer in (1, 2):
        assert calls[layer][0].tolist() == experts[:, layer].tolist()


def test_routes_of_other_weights_are_noticed():
    model = tiny_model()
    experts = [random_experts(7, 3, 8, 2, seed) for seed in (0, 1)]
    trace = RoutingTrace.from_samples(experts, num_experts=8, sample_ids=[10, 11], weight_versions=[4, 3])
    routes = BatchRoutes.packed(trace)
    assert routes.weight_versions == (4, 3)
    assert_refused(model, routes, "sample 11: .* under weight version 3, the model has 4", weight_version=4)
    with replay_routing(model, BatchRoutes.packed(trace.select([0])), weight_version=4):
        model(random_tokens(1, 7))
    with replay_routing(model, routes):
        model(random_tokens(2, 7))


def test_a_changed_gate_rule_is_checked_again(monkeypatch):
    model = tiny_model()
    routes, _ = other_routes(model)
    checks = []
    holds = RouterSite.rule_holds
    monkeypatch.setattr(
        RouterSite, "rule_holds", lambda site, output: checks.append(site.layer_id) or holds(site, output)
    )

    def checked():
        checks.clear()
        with replay_routing(model, routes):
            model(random_tokens(2, 7), use_cache=False)
        return list(checks)

    assert checked() == [0, 1, 2]
    assert checked() == []
    model.model.layers[1].mlp.gate.norm_topk_prob = False
    assert checked() == [1]
    model.bfloat16()
    assert checked() == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"layer_ids": [0, 1]}, r"layers \[0, 1\], the model has MoE layers \[0, 1, 2\]: missing \[2\], extra \[\]"),
        ({"layer_ids": [0, 1, 2, 3]}, r"missing \[\], extra \[3\]"),
        ({"layer_ids": [0, 1, 2], "num_experts": 16}, "layer 0: the routes have 16 experts, the model has 8"),
        ({"layer_ids": [0, 1, 2], "top_k": 3}, "layer 0: the routes have 3 choices per token, the model has 2"),
    ],
)
def test_routes_of_another_model_are_refused(settings, complaint):
    assert_refused(tiny_model(), BatchRoutes.packed(random_trace([7, 7], **settings)), complaint)


def test_a_batch_with_another_number_of_rows_is_refused():
    model = tiny_model()
    routes, _ = other_routes(model)
    with (
        pytest.raises(TraceError, match="layer 0: its router sees 6 rows, the routes have 14"),
        replay_routing(model, routes),
    ):
        model(random_tokens(1, 6))


def test_top_1_layers_that_are_all_zero_are_refused():
    model = tiny_model(num_experts_per_tok=1)
    experts = np.random.default_rng(0).integers(0, 8, (20, 3, 1))
    with replay_routing(model, BatchRoutes.packed(RoutingTrace.from_samples([experts], num_experts=8))):
        policy_loss(model, random_tokens(1, 20)).backward()
    experts[:, 1] = 0
    empty = BatchRoutes.packed(RoutingTrace.from_samples([experts], num_experts=8))
    assert_refused(model, empty, "layer 1: all 20 recorded rows, from sample 0, row 0 on")


def test_autocast_replays_to_the_same_bits():
    model = tiny_model()
    ids_BN = random_tokens(2, 7)
    with torch.autocast("cpu", torch.bfloat16):
        with record_routing(model) as recorder:
            native = model(ids_BN, use_cache=False).logits
        trace = RoutingTrace.from_samples([recorder.take()[0].numpy()], num_experts=8)
        with replay_routing(model, BatchRoutes.packed(trace)):
            assert torch.equal(model(ids_BN, use_cache=False).logits, native)
