"""Grouped experts: right beside float64, and timed piece by piece."""

import numpy as np
import pytest
import torch

import relibra.calibration.grouped_experts as grouped
from relibra import EngineError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_are_right(dtype):
    experts = grouped.grouped_experts(5, 300, 48, 32, CPU, dtype)
    assert 0 < experts.check() < grouped.ERROR_BOUNDS[dtype]
    assert experts.work([0, 0])() == ()
    output, of_rows, of_gate_up, of_down = experts.work([7, 0, 5])()
    assert output.shape == of_rows.shape == (12, 48)
    assert (of_gate_up.shape, of_down.shape) == ((2, 64, 48), (2, 48, 32))
    assert output.equal(experts.work([7, 5])()[0])


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_wrong_experts_are_not_timed(monkeypatch, factor):
    right = grouped.apply_experts
    monkeypatch.setattr(grouped, "apply_experts", lambda *parts: right(*parts) * factor)
    with pytest.raises(EngineError, match="nothing is timed"):
        grouped.grouped_experts(2, 10, 16, 16, CPU, torch.bfloat16).check()


def test_seconds_are_those_of_each_piece():
    experts = grouped.grouped_experts(1, 4000, 64, 64, CPU, torch.float32)
    found = [grouped.seconds_each([experts.work([rows]) for rows in (4000, 20, 0)], CPU) for _ in range(5)]
    many, few, none = np.median(found, axis=0)
    assert many > 2 * few > few > 2 * none
