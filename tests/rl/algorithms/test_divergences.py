"""Estimates of a divergence, and their gradients, against exact sums over a small vocabulary."""

import pytest
import torch

from relibra.rl.algorithms.terms import kl_estimate

REFERENCE_V = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
LOGITS_V = torch.tensor([0.2, -0.3, 0.1, 0.4], dtype=torch.float64)


def exact(kl):
    """Value and gradient of a divergence from logits."""
    logits_V = LOGITS_V.clone().requires_grad_()
    value = kl(logits_V.softmax(0), REFERENCE_V)
    return value.item(), torch.autograd.grad(value, logits_V)[0]


def expected(kind):
    """Mean and mean gradient of an estimate over tokens sampled from the policy; the sampling has no gradient."""
    logits_V = LOGITS_V.clone().requires_grad_()
    log_probs_V = logits_V.log_softmax(0)
    mean = (log_probs_V.exp().detach() * kl_estimate(kind, log_probs_V, REFERENCE_V.log())[0]).sum()
    return mean.item(), torch.autograd.grad(mean, logits_V)[0]


def forward(p_V, q_V):
    return (p_V * (p_V / q_V).log()).sum()


def test_k1_and_k3_are_right_in_the_mean_and_k2_nearly():
    value, _ = exact(forward)
    assert expected("k1")[0] == pytest.approx(value, rel=1e-12)
    assert expected("k3")[0] == pytest.approx(value, rel=1e-12)
    assert expected("k3+")[0] == pytest.approx(value, rel=1e-12)
    assert expected("k2")[0] == pytest.approx(value, rel=0.5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3+"])
def test_gradients_of_k1_k2_and_k3_plus_equal_the_divergence(kind):
    torch.testing.assert_close(expected(kind)[1], exact(forward)[1], rtol=1e-12, atol=1e-15)


def test_gradient_of_k3_is_that_of_the_other_direction():
    _, gradient = exact(lambda p_V, q_V: forward(q_V, p_V))
    torch.testing.assert_close(expected("k3")[1], gradient, rtol=1e-12, atol=1e-15)


def test_k2_and_k3_are_never_negative_and_zero_if_policies_agree():
    logp = torch.linspace(-3, 3, 61, dtype=torch.float64)
    for kind in ("k2", "k3", "k3+"):
        got, limited = kl_estimate(kind, logp, torch.zeros_like(logp))
        assert (got >= 0).all()
        assert bool((limited == (got >= 10)).all())
        assert float(got.min()) == pytest.approx(0.0, abs=1e-20)
    tiny, _ = kl_estimate("k3", torch.tensor([1e-6], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert tiny.item() == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
def test_no_token_outweighs_all_others(kind):
    """At log-ratios of -10 and -95 an unlimited k3 is 2e4 and 2e41."""
    logp = torch.tensor([0.1, -10.0, -95.0, 95.0], requires_grad=True)
    got, limited = kl_estimate(kind, logp, torch.zeros(4))
    (gradient,) = torch.autograd.grad(got.sum(), logp)
    assert got.abs().max() <= {"k1": 20, "k2": 200}.get(kind, 10)
    assert limited.tolist() == [False, kind in ("k3", "k3+"), True, True]
    assert gradient.abs().max() <= 20
    assert gradient[2] == gradient[3] == 0
