"""docs/extending.md: its loss, its balancer and its router work as they stand there, and wrong ones are told."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from relibra.errors import ConfigError, PlanError
from relibra.planning.balancers.static import decide as decide_static
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.batch.step_plan import try_balancer
from relibra.rl.config.run_config import check_resumable, load_config
from tests.planning.cases import cluster
from tests.rl.ranks_at_work import comparable, run_alone

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
LOSS, BALANCER, USE, ROUTER = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that writes a module into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    return write


@pytest.mark.parametrize("block", [LOSS, BALANCER, ROUTER], ids=["loss", "balancer", "router"])
def test_examples_are_short(block):
    assert block.count("\n") < 40


def loss_of(*overrides):
    return find_loss(load_config(None, overrides))


def test_the_loss_trains_is_logged_and_resumes(module, tmp_path):
    module("my_loss", LOSS)
    settings = ("algorithm.loss=my_loss:cispo", "algorithm.group_filter=off", "update.learning_rate=1e-3")
    whole = run_alone((*settings, "run.steps=2"), tmp_path / "whole")
    first = run_alone((*settings, "run.steps=1", "checkpoint.every=1"), tmp_path / "cut")
    sys.modules.pop("my_loss")
    second = run_alone((*settings, "run.steps=2", "checkpoint.every=1"), tmp_path / "cut")
    assert comparable([*first, *second]) == comparable(whole)
    for row in whole:
        assert 0 <= row["clip_fraction"] < 1
        assert row["loss_metrics"]["ratio"] == pytest.approx(1, abs=0.1)
        assert row["loss"] != 0
    kept = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert kept["algorithm"]["loss"] == "my_loss:cispo"


def test_metrics_may_have_gradients(module):
    module(
        "my_metrics", "def mine(inputs):\n    total = inputs.log_probs_X.sum()\n    return total, {'total': total}\n"
    )
    assert loss_of("algorithm.loss=my_metrics:mine").metrics == ("total",)


def test_a_resumed_run_keeps_its_loss():
    before, after = (load_config(None, [f"algorithm.loss=my_loss:{name}"]) for name in ("cispo", "other"))
    with pytest.raises(ConfigError, match=r"algorithm\.loss was 'my_loss:cispo' and cannot change"):
        check_resumable(before, after)


def test_the_loss_of_grpo_as_a_function_of_the_user_is_grpo(module):
    module("my_grpo", "from relibra.rl.algorithms.grpo import loss\ndef mine(inputs):\n    return loss(inputs)\n")
    mine = loss_of("algorithm.preset=grpo", "algorithm.loss=my_grpo:mine", "algorithm.kl_coefficient=0.1")
    assert mine.metrics == loss_of("algorithm.preset=grpo", "algorithm.kl_coefficient=0.1").metrics
    assert mine.metrics == ("clip_fraction", "masked_fraction", "reference_kl", "reference_kl_limited")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def mine(inputs, settings): ...", "it is called as mine(inputs), which it does not take"),
        ("inputs.rewards", "raised AttributeError: 'LossInputs' object has no attribute"),
        ("inputs.log_probs_X.sum()", "allowed is (loss, metrics)"),
        ("inputs.log_probs_X, {}", "returned (tensor([-"),
        ("inputs.log_probs_X.sum().long(), {}", "a tensor of one finite number"),
        ("inputs.log_probs_X[inputs.mask_X].mean(), {}", "{}) for 0 trained"),
        ("inputs.log_probs_X.sum() / 0, {}", "returned (-inf"),
        ("inputs.log_probs_X.sum(), {'a': float('nan')}", "dict of finite numbers"),
        ("inputs.log_probs_X.sum(), {str(int(inputs.mask_X.sum())): 1}", "of the same names"),
        ("inputs.old_log_probs_X.sum(), {}", "has no gradient"),
        ("mine = 3", "which cannot be called"),
        ("def other(inputs): ...", "has no such function"),
    ],
)  # fmt: skip
def test_a_wrong_loss_is_told_in_a_sentence(module, body, said):
    module("my_wrong_loss", f"def mine(inputs):\n    return {body}\n" if body.startswith("inputs.") else body)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        loss_of("algorithm.loss=my_wrong_loss:mine")
    assert str(caught.value).startswith("algorithm.loss ")
    assert "my_wrong_loss:mine" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("loss", "cispo"), ("ratio", "sequence")])
def test_settings_that_do_not_fit_the_loss_are_refused(name, value):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"algorithm.{name}={value}"])
    assert (caught.value.what, caught.value.got) == (f"algorithm.{name}", value)


def test_the_balancer_plans_as_the_page_prints(module, capsys):
    module("my_balancer", BALANCER)
    exec(compile(USE, "docs/extending.md", "exec"), {})
    [printed] = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    assert capsys.readouterr().out == printed


def trial(balancer, *overrides):
    config = load_config(None, [f"plan.balancer={balancer}", *overrides])
    try_balancer(config.plan, cluster(1, 4), num_experts=8)


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_the_balancer_passes_its_trial(module, slots):
    module("my_balancer", BALANCER)
    trial("my_balancer:decide", f"plan.slots={slots}")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "balancer 'my_wrong:decide' (request -> Placement) raised"),
        ("return request.nothing", "(request -> Placement) raised AttributeError"),
        ("return request.placement(0 * request.previous.home_LE, *request.empty_slots())", "raised AssertionError"),
        ("return kept(request, *(one.astype(float) for one in request.empty_slots()))", "balancer 'my_wrong:decide'"),
        ("return kept(request, *(one[:, :1] for one in request.empty_slots()))", "balancer 'my_wrong:decide'"),
    ],
)  # fmt: skip
def test_a_wrong_balancer_is_told_in_a_sentence(module, body, said):
    kept = "def kept(request, *slots):\n    return request.placement(request.previous.home_LE, *slots)\n"
    module("my_wrong", f"{kept}\ndef decide(request):\n    {body}\n")
    with pytest.raises(PlanError, match=re.escape(said)) as caught:
        trial("my_wrong:decide")
    assert "\n" not in str(caught.value)


def test_a_balancer_that_is_not_there_is_told(module):
    module("my_empty", "def plan(request, more): ...\n")
    with pytest.raises(ConfigError, match=r"plan\.balancer is 'my_empty:decide': .* has no such function"):
        trial("my_empty:decide")
    with pytest.raises(ConfigError, match=r"called as plan\(request\), which it does not take"):
        trial("my_empty:plan")
    with pytest.raises(ConfigError, match="balancer 'nothing' is unknown: allowed are"):
        trial("nothing")


def test_a_function_of_the_user_may_decide_as_a_balancer_of_ours(module):
    module("my_static", f"from {decide_static.__module__} import decide\n")
    trial("my_static:decide")


def test_the_router_records_and_replays(module):
    from relibra.replay import BatchRoutes, find_routers, record_routing, replay_routing
    from relibra.replay.families import RULES
    from tests.replay.tiny_models import random_tokens, tiny_model

    module("my_router", ROUTER)
    model = tiny_model("qwen3_moe")
    try:
        router = importlib.import_module("my_router").SoftplusRouter
        torch.manual_seed(0)
        for layer in model.model.layers:
            layer.mlp.gate = router(
                model.config.hidden_size, model.config.num_experts, model.config.num_experts_per_tok
            )
        assert {type(site.module) for site in find_routers(model)} == {router}
        ids_BN = random_tokens(2, 7)
        with record_routing(model) as recorder:
            native = model(ids_BN, use_cache=False).logits
        trace = recorder.take_trace(ids_BN, torch.ones_like(ids_BN))
        with replay_routing(model, BatchRoutes.padded(trace, torch.ones_like(ids_BN), ids_BN)) as replay:
            replayed = model(ids_BN, use_cache=False).logits
            replayed.logsumexp(-1).mean().backward()
        assert torch.equal(native, replayed)
        assert replay.disagreement == 0
        assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)
    finally:
        RULES.pop("SoftplusRouter", None)
