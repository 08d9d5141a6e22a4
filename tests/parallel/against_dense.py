"""What ranks computed, compared with the dense model in one process, and with what other ranks or plans computed."""

import numpy as np
import pytest
import torch

from tests.parallel.ranks_at_work import dense_step
from tests.replay.tiny_models import tiny_model

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def assert_equals_dense(case, results_R):
    """Compare the logits, the loss and the gradients of a step."""
    expected = dense_step(case)
    logits = {s: own for result in results_R for s, own in result["logits"].items()}
    assert logits.keys() == expected["logits"].keys()
    for s in logits:
        torch.testing.assert_close(logits[s], expected["logits"][s], **CLOSE)
    assert sum(result["loss"] for result in results_R) == pytest.approx(expected["loss"], rel=1e-5)
    for result in results_R:
        if case.autocast:  # what is rounded to bfloat16 on two ranks may round the other way
            assert relative_error([result], expected["gradients"]) < 0.01
        else:
            assert_gradients_close(result["gradients"], expected["gradients"], "")


def assert_gradients_close(found, expected, name):
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, expected[parameter], **CLOSE, msg=f"{name}: {parameter}")


def assert_only_experts_are_frozen(case, results_R):
    """Experts have no gradients, all other parameters those of the dense model."""
    expected = dense_step(case)["gradients"]
    for result in results_R:
        kept = {parameter: gradient for parameter, gradient in result["gradients"].items() if gradient is not None}
        assert kept.keys() == {parameter for parameter in expected if ".experts." not in parameter}
        assert_gradients_close(kept, expected, "frozen")


def losses(results_R):
    return np.sum([result["losses"] for result in results_R], axis=0)


def assert_same_training(expected, results_R, name):
    """Compare the losses and the weights of a training with those of the dense model."""
    np.testing.assert_allclose(losses(results_R), expected["losses"], rtol=1e-5, err_msg=name)
    for result in results_R:
        for parameter, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][parameter], weight, **CLOSE, msg=f"{name}: {parameter}")


def assert_same_bits_of_training(expected_R, results_R, name):
    """Compare the losses of each rank and all weights with those under another plan."""
    for rank, result in enumerate(results_R):
        assert result["losses"] == expected_R[rank]["losses"], name
        for parameter, weight in expected_R[0]["weights"].items():
            assert torch.equal(result["weights"][parameter], weight), (name, rank, parameter)


def assert_same_bits(results_R, others_R, name):
    """Compare the logits, the loss and the gradients of a step with those of another one."""
    for result, other in zip(results_R, others_R, strict=True):
        assert result["loss"] == other["loss"], name
        for kind in ("logits", "gradients"):
            assert result[kind].keys() == other[kind].keys(), name
            for key, tensor in result[kind].items():
                assert (tensor is None) == (other[kind][key] is None), (name, key)
                assert tensor is None or torch.equal(tensor, other[kind][key]), (name, key)


def rounded(family):
    """The model with the weights that it has in bfloat16, to be run in single precision."""
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def relative_error(results_R, exact):
    """Return the error of all gradients over their norm."""
    gradients = results_R[0]["gradients"]
    squares = sum(float((gradients[name].float() - gradient).square().sum()) for name, gradient in exact.items())
    return (squares / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5
