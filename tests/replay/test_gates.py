"""Every gate rule against the router whose weights it stands for."""

from pathlib import Path

import pytest
import torch

from relibra.replay.families import REFUSED, RULES
from tests.replay.router_zoo import CHOICES, EXPERTS, call_router, hidden_states, modules_by_class, tiny_router
from tests.replay.tiny_models import random_experts

README = Path(__file__).parents[2] / "README.md"
PRECISIONS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


SETTINGS = [
    *(
        pytest.param(name, norm, "sigmoid", id=f"{name}-{'norm' if norm else 'raw'}")
        for name in sorted(RULES)
        for norm in (True, False)
    ),
    pytest.param("Cohere2MoeTopKRouter", True, "softmax", id="Cohere2MoeTopKRouter-softmax"),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "norm", "selection"), SETTINGS)
def test_native_ids_give_native_bits(name, norm, selection, precision):
    dtype, autocast = PRECISIONS[precision]
    router = tiny_router(name, norm=norm, dtype=dtype, selection=selection)
    rule = RULES[name](router)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores_TE, native_TK, ids_TK, *_ = call_router(router, hidden_states(33, dtype))
        replayed_TK = rule(scores_TE, ids_TK, native_TK.dtype)
    assert ids_TK.shape == (33, CHOICES)
    assert replayed_TK.dtype == native_TK.dtype
    assert torch.equal(replayed_TK, native_TK)

    direction_TK = torch.randn(native_TK.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((native_TK * direction_TK).sum(), _trained(router), retain_graph=True)
    got = torch.autograd.grad((replayed_TK * direction_TK).sum(), _trained(router))
    for one, other in zip(wanted, got, strict=True):
        assert one.abs().sum() > 0
        if precision == "fp32":
            assert torch.equal(one, other)
        else:  # the sum over rows may round at other places
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(one.abs().max()))


@pytest.mark.parametrize(("name", "norm", "selection"), SETTINGS)
def test_foreign_ids_get_weight_and_gradient_in_any_group(name, norm, selection):
    router = tiny_router(name, norm=norm, dtype=torch.float32, selection=selection)
    scores_TE, native_TK, ids_TK, *_ = call_router(router, hidden_states(64, torch.float32))
    foreign_TK = torch.from_numpy(random_experts(64, 1, EXPERTS, CHOICES)[:, 0])
    scores_TE.retain_grad()
    weights_TK = RULES[name](router)(scores_TE, foreign_TK, native_TK.dtype)
    assert (weights_TK > 0).all()
    direction_TK = torch.randn(64, CHOICES, generator=torch.Generator().manual_seed(2))
    (weights_TK * direction_TK).sum().backward()
    assert (scores_TE.grad.gather(1, foreign_TK) != 0).all()
    assert (ids_TK.sort().values != foreign_TK.sort().values).any(1).float().mean() > 0.9


def test_every_class_of_the_tables_is_in_transformers():
    assert set(RULES) | set(REFUSED) <= set(modules_by_class())
    assert not set(RULES) & set(REFUSED)


def test_no_router_rule_is_lost():
    assert len(RULES) >= 64
    assert f"supports {len(RULES)} router" in README.read_text()


def _trained(router):
    unused = {"per_expert_scale"}  # compared through the weights already; its gradient may be zero for unused experts
    return [p for name, p in router.named_parameters() if p.requires_grad and name.split(".")[-1] not in unused | _BIAS]


_BIAS = {"e_score_correction_bias"}
