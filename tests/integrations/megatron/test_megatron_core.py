"""Models of the released Megatron-core on two processes: routes, plans and homes against the stock model."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/guides/trainers.md")

from relibra.errors import EngineError
from tests.integrations.megatron.ranks_at_work import (
    EXPERTS,
    LAYERS,
    RANKS,
    TOP_K,
    VOCABULARY,
    backward,
    build,
    forward,
    gradients,
    make_plan,
    on_ranks,
    routes,
    run_step,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]

MAP = np.array([[5, 1, 2, 7, 4, 0, 6, 3], [0, 1, 6, 3, 4, 5, 2, 7]])
"""Experts at each position, in each layer."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def stock_step(**settings):
    """Return logits and gradients of the stock model that replays the routes as Megatron's own users do it."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    model, ids_MTLK = build(planned=False, **settings), routes()

    def begin(number):
        RouterReplay.set_replay_data([torch.from_numpy(ids_MTLK[number][:, layer]) for layer in range(LAYERS)])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    logits = run_step(model, begin)
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    return logits, gradients(model)


def replays_routes():
    """Routes through RouteReplay, with and without recomputation, and native routing before and after."""
    from relibra.integrations.megatron.route_replay import RouteReplay

    expected, ids_MTLK, result = stock_step(), routes(), {}
    for name, settings in (("plain", {}), ("recompute", RECOMPUTE)):
        model = build(planned=False, **settings)
        native = forward(model, 0).detach()
        with RouteReplay([model]) as replay:
            logits = run_step(model, lambda number: replay.begin(ids_MTLK[number]))
            awaiting = replay.num_awaiting
            with torch.no_grad():
                replay.begin(ids_MTLK[0])
                scored = forward(model, 0)
            errors = []
            for wrong in (ids_MTLK[0][:, :, :2], ids_MTLK[0][:, :1], np.zeros_like(ids_MTLK[0]), ids_MTLK[0][:-1]):
                try:
                    replay.begin(wrong)
                    forward(model, 0)
                except EngineError as error:
                    errors.append(str(error))
        left = [len(m.router_replay.replay_backward_list) for m in model.modules() if hasattr(m, "router_replay")]
        result[name] = {
            "logits": torch.equal(logits, expected[0]),
            "gradients": all(torch.equal(g, expected[1][n]) for n, g in gradients(model).items()),
            "scored": torch.equal(scored, expected[0][0]),
            "native": torch.equal(forward(model, 0).detach(), native),
            "replay differs": not torch.equal(native, expected[0][0]),
            "awaiting": awaiting + sum(left),
            "errors": errors,
        }
    return result


def counted_gathers(run):
    """Return what run returns, and how many collectives that gather counts it called."""
    from torch import distributed

    calls, patched = [], ("all_gather", "all_gather_into_tensor", "_all_gather_base")
    own = {name: getattr(distributed, name) for name in patched}
    for name, function in own.items():
        setattr(distributed, name, lambda *a, _f=function, **k: (calls.append(1), _f(*a, **k))[1])
    try:
        return run(), len(calls)
    finally:
        for name, function in own.items():
            setattr(distributed, name, function)


def follows_plans():
    """Replicas, homes, both, neither; with and without recomputation: logits and gradients against the stock model.

    Matrix products of a CPU round a row differently in batches of other sizes. Here experts compute row by row, so that
    outputs of plans can be compared bit for bit.
    """
    torch_matmul = torch.matmul

    def matmul(a, b):
        return (a.unsqueeze(-1) * b).sum(-2) if a.dim() == b.dim() == 2 else torch_matmul(a, b)

    with mock.patch.object(torch, "matmul", matmul):
        return _follow_plans()


def _follow_plans():
    from relibra.integrations.megatron.execution import execute_plan
    from relibra.integrations.megatron.homes import relocate

    expected, ids_MTLK, result = stock_step(), routes(), {}
    cases = {
        "home": (0, None, {}),
        "homes": (0, MAP, {}),
        "replicas": (2, None, {}),
        "both": (2, MAP, {}),
        "many": (6, MAP, {}),
        "recompute": (2, MAP, RECOMPUTE),
        "recomputed experts": (2, MAP, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    }
    for name, (slots, home_map, settings) in cases.items():
        plan, demand = make_plan(ids_MTLK, slots, home_map)
        model = build(planned=True, **settings)
        relocate([model], plan.physical_to_logical_map)
        with execute_plan([model], plan, demand) as step:
            logits, gathers = counted_gathers(partial(run_step, model, lambda m, step=step: step.begin(m, ids_MTLK[m])))
            awaiting = step.num_awaiting
        names = set(dict(model.named_parameters()))
        relocate([model], np.tile(np.arange(EXPERTS), (LAYERS, 1)))
        result[name] = {
            "replicas": plan.num_copies,
            "skew": plan.skew(plan.scheduled(demand)),
            "logits": torch.equal(logits, expected[0]),
            "gradients": gradient_difference(model, expected[1], home_map),
            "gathers": gathers,
            "awaiting": awaiting,
            "names": names == set(expected[1]),
        }
    return result


def gradient_difference(model, expected, home_map):
    """Return the largest difference of gradients; those of experts lie where the experts were at home."""
    from torch import distributed

    def of_experts(gradient, layer):
        return torch.stack(
            [
                torch.cat(
                    [g.flatten() for n, g in gradient.items() if f"layers.{layer}." in n and f"experts.{e}." in n]
                )
                for e in range(EXPERTS // RANKS)
            ]
        )

    found, difference = gradients(model), 0.0
    for layer in range(LAYERS):
        own = of_experts(expected, layer)
        everywhere = [torch.empty_like(own) for _ in range(RANKS)]
        distributed.all_gather(everywhere, own)
        positions = np.arange(EXPERTS) if home_map is None else home_map[layer]
        mine = np.split(positions, RANKS)[distributed.get_rank()]
        difference = max(difference, float((of_experts(found, layer) - torch.cat(everywhere)[mine]).abs().max()))
    others = [float((found[n] - expected[n]).abs().max()) for n in expected if "local_experts" not in n]
    return max(difference, *others)


def trains_and_moves():
    """Three steps of Adam with other homes and replicas in each; then parameters and states in logical order."""
    from relibra.integrations.megatron.execution import execute_plan
    from relibra.integrations.megatron.homes import logical_order, relocate
    from relibra.integrations.megatron.route_replay import RouteReplay

    stock = build(planned=False)
    optimizer = torch.optim.Adam(stock.parameters(), lr=1e-2)
    for seed in range(3):
        ids_MTLK = routes(seed)
        optimizer.zero_grad()
        with RouteReplay([stock]) as replay:
            run_step(stock, lambda m, ids=ids_MTLK: replay.begin(ids[m]))
        optimizer.step()
    model = build(planned=True)
    adam, moved = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for seed, home_map in enumerate((None, MAP, MAP[::-1])):
        ids_MTLK = routes(seed)
        plan, demand = make_plan(ids_MTLK, 2, home_map)
        moved.append(relocate([model], plan.physical_to_logical_map, adam))
        adam.zero_grad()
        with execute_plan([model], plan, demand) as step:
            run_step(model, lambda m, ids=ids_MTLK, step=step: step.begin(m, ids[m]))
        adam.step()
    refused = []
    for use in (model.state_dict, model.sharded_state_dict, partial(model.load_state_dict, stock.state_dict())):
        try:
            use()
        except EngineError as error:
            refused.append(str(error))
    with logical_order([model], adam):
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
        states = [adam.state[p]["exp_avg"].clone() for p in model.parameters()]
        sharded = sorted(model.sharded_state_dict())
    expected = stock.state_dict()
    return {
        "moved": moved,
        "refused": refused,
        "weights": max(float((saved[n] - expected[n]).abs().max()) for n in saved),
        "states": max(
            float((own - optimizer.state[p]["exp_avg"]).abs().max())
            for own, p in zip(states, stock.parameters(), strict=True)
        ),
        "sharded": sharded == sorted(stock.sharded_state_dict()),
        "back": [layer.physical_to_logical_E.tolist() for layer in _layers(model)],
    }


class ShardedStates:
    """Stands in for Megatron's DistributedOptimizer, which does not start without CUDA: halves of states, by expert."""

    def __init__(self, model, other_parts=False):
        self.states, self.parts, self.other_parts = {}, {}, other_parts
        for layer in _layers(model):
            for slot in range(layer.num_local_experts):
                expert = float(layer.local_expert_indices[slot])
                for one in layer.expert_parameters(slot):
                    half = one.tensor.numel() // 2
                    start = half * (slot % 2) if other_parts else 0
                    self.parts[one.tensor] = {"param": SimpleNamespace(start=start, end=start + half)}
                    self.states[one.tensor] = {key: torch.full((half,), expert) for key in ("param", "exp_avg")}
        self.model_param_group_index_map = dict.fromkeys(self.states, (0, 0))

    def _get_model_param_range_map(self, parameter):
        return self.parts[parameter]

    def _get_main_param_and_optimizer_states(self, parameter):
        return self.states[parameter]

    def _set_main_param_and_optimizer_states(self, parameter, tensors):
        self.states[parameter] = {key: tensor.clone() for key, tensor in tensors.items()}


def moves_shards():
    """States of the distributed optimizer follow their experts; shards cut at other places do not move."""
    from relibra.integrations.megatron.homes import relocate

    model, errors = build(planned=True), []
    optimizer = SimpleNamespace(chained_optimizers=[ShardedStates(model)])
    relocate([model], MAP, optimizer)
    follow = [
        bool((tensor == float(layer.physical_to_logical_E[layer.local_expert_indices[slot]])).all())
        for layer in _layers(model)
        for slot in range(layer.num_local_experts)
        for one in layer.expert_parameters(slot)
        for tensor in optimizer.chained_optimizers[0].states[one.tensor].values()
    ]
    other = build(planned=True)
    for wrong in (ShardedStates(other, other_parts=True), torch.optim.SGD(model.parameters())):
        try:
            relocate([other], MAP, wrong)
        except EngineError as error:
            errors.append(str(error))
    return {
        "follow": all(follow),
        "errors": errors,
        "homes": [la.physical_to_logical_E.tolist() for la in _layers(other)],
    }


def shares_samples():
    """Tensor parallelism with sequence parallelism: both expert-parallel ranks hold rows of each sample."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def rms_norm(_cls, config, hidden_size, **_):
        return torch.nn.RMSNorm(hidden_size)  # what Megatron's wrapper returns, which asserts that nothing is parallel

    with mock.patch.object(WrappedTorchNorm, "__new__", rms_norm):
        return _share_samples()


def _share_samples():
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from relibra.integrations.megatron.execution import execute_plan
    from relibra.integrations.megatron.row_layout import RowLayout

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=RANKS, expert_model_parallel_size=RANKS, expert_tensor_parallel_size=1
    )
    settings = {"tensor_model_parallel_size": RANKS, "sequence_parallel": True}
    lengths, rng = [19, 12], np.random.default_rng(3)
    score = rng.random((sum(lengths), LAYERS, EXPERTS)) + np.array([1, 0, 0, 0, 0, 0.6, 0, 0])
    samples = np.split(np.argsort(-score, axis=2)[:, :, :TOP_K], [lengths[0]])
    rows = RowLayout.of_verl(tensor_ranks=RANKS, context_ranks=1).rows(lengths)
    ids_TLK = rows.routes(parallel_state.get_tensor_model_parallel_rank(), samples, num_experts=EXPERTS)
    pack = torch.from_numpy(rng.integers(0, VOCABULARY, (1, rows.sample_XT.size)))
    RouterReplay.clear_global_router_replay_instances()
    stock = build(planned=False, **settings)
    RouterReplay.set_replay_data([torch.from_numpy(ids_TLK[:, layer]) for layer in range(LAYERS)])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    expected = forward(stock, 0, pack)
    backward(expected)
    plan, demand = make_plan([ids_TLK], 2)
    model = build(planned=True, **settings)
    with execute_plan([model], plan, demand) as step:
        step.begin(0, ids_TLK)
        logits = forward(model, 0, pack)
        backward(logits)
    return {
        "replicas": plan.num_copies,
        "logits": float((logits - expected).abs().max()),
        "gradients": gradient_difference(model, gradients(stock), None),
        "rows": len(ids_TLK),
    }


def _layers(model):
    from relibra.integrations.megatron.execution import planned_layers

    return planned_layers([model]).values()


def refuses():
    """What does not fit together is one sentence, on every rank."""
    from relibra.integrations.megatron.execution import execute_plan
    from relibra.integrations.megatron.homes import relocate

    ids_MTLK, errors = routes(), {}
    plan, demand = make_plan(ids_MTLK, 2, MAP)

    def note(name, work):
        try:
            work()
        except EngineError as error:
            errors[name] = str(error)

    def other_routes():
        model = build(planned=True)
        relocate([model], plan.physical_to_logical_map)
        with execute_plan([model], plan, demand) as step:
            step.begin(0, routes(7)[0])
            forward(model, 0)

    note("homes", lambda: execute_plan([build(planned=True)], plan, demand).__enter__())
    note("stock", lambda: execute_plan([build(planned=False)], plan, demand).__enter__())
    note("routes", other_routes)
    note("map", lambda: relocate([build(planned=True)], np.zeros((LAYERS, EXPERTS), dtype=int)))
    note("deepep", lambda: build(planned=True, moe_token_dispatcher_type="flex"))
    note("allgather", lambda: build(planned=True, moe_token_dispatcher_type="allgather"))
    note("capacity", lambda: build(planned=True, moe_expert_capacity_factor=1.0))
    return errors


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = [replays_routes, follows_plans, trains_and_moves, refuses, moves_shards, shares_samples]
    return on_ranks(cases, tmp_path_factory.mktemp("megatron"))


def test_recorded_routes_are_followed_as_by_megatron_itself(found):
    for of_rank in found["replays_routes"]:
        for case in of_rank.values():
            errors = case.pop("errors")
            assert case.pop("awaiting") == 0
            assert all(case.values()), case
            assert [any(word in error for error in errors) for word in ("choices", "twice", "rows")] == [True] * 3
            assert len(errors) == 4


def test_outputs_have_the_same_bits_under_every_plan(found):
    for of_rank in found["follows_plans"]:
        for name, case in of_rank.items():
            assert case["logits"], name
            assert case["gradients"] < 5e-7, name
            assert (case["gathers"], case["awaiting"], case["names"]) == (0, 0, True)
        assert of_rank["home"]["gradients"] == of_rank["homes"]["gradients"] == 0
        assert of_rank["replicas"]["replicas"] > 0
        assert of_rank["both"]["skew"] < of_rank["homes"]["skew"]


def test_experts_move_with_states_and_are_saved_in_order(found):
    for of_rank in found["trains_and_moves"]:
        assert of_rank["moved"][0] == 0
        assert min(of_rank["moved"][1:]) > 0
        assert len(of_rank["refused"]) == 3
        assert of_rank["weights"] < 2e-5
        assert of_rank["states"] < 5e-7
        assert of_rank["sharded"]
        assert of_rank["back"] == MAP[::-1].tolist()


def test_shards_of_states_follow_their_experts_or_nothing_moves(found):
    for of_rank in found["moves_shards"]:
        assert of_rank["follow"]
        assert ["cut at other places" in of_rank["errors"][0], "is not among" in of_rank["errors"][1]] == [True, True]
        assert of_rank["homes"] == [list(range(EXPERTS))] * LAYERS


def test_ranks_that_share_samples_follow_a_plan_of_their_rows(found):
    for of_rank in found["shares_samples"]:
        assert of_rank["replicas"] > 0
        assert of_rank["rows"] == 16
        assert of_rank["logits"] < 1e-7
        assert of_rank["gradients"] < 5e-7


@pytest.mark.filterwarnings("ignore")  # Megatron misses apex
def test_specs_of_layers_blocks_and_stacks_are_planned():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from relibra.integrations.megatron.moe_layer import PlannedMoELayer, with_planned_layers

    moe, dense = get_gpt_layer_local_spec(num_experts=EXPERTS), get_gpt_layer_local_spec()
    block = with_planned_layers(TransformerBlockSubmodules(layer_specs=[dense, moe]))
    assert block.layer_specs[0] is dense
    assert block.layer_specs[1].submodules.mlp.func is PlannedMoELayer
    stack = with_planned_layers(ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(moe_layer=moe)))
    assert stack.submodules.moe_layer.submodules.mlp.func is PlannedMoELayer
    with pytest.raises(EngineError, match="no layer of the spec has experts"):
        with_planned_layers(dense)


def test_what_does_not_fit_is_refused(found):
    expected = {
        "homes": "experts are not at the homes of the plan",
        "stock": "with_planned_layers",
        "routes": "the routers chose other experts than planned",
        "map": "is no permutation",
        "deepep": "topk(probs)",
        "allgather": "moe_token_dispatcher_type='alltoall'",
        "capacity": "moe_expert_capacity_factor=None",
    }
    for errors in found["refuses"]:
        assert errors.keys() == expected.keys()
        assert all(part in errors[name] for name, part in expected.items()), errors


def test_the_example_prints_what_it_says():
    example = ROOT / "examples" / "megatron_core.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("step", "losses", "weights"))]
    assert "".join(f"# {line}\n" for line in lines) == example.read_text().split("# Output:\n")[1]
