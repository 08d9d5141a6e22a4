"""Products of narrow rows in whole blocks equal the product of each expert."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import pad

from relibra.rl.model import block_product
from relibra.rl.model.block_product import BLOCK, grouped_mm


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("counts", [[3, 1, 4, 1, 5, 9, 2, 6], [0] * 7 + [8], [70, 0, 64, 1, 200, 0, 0, 3]])
def test_blocks_of_narrow_rows_equal_the_product_of_each_expert(counts, transposed):
    torch.manual_seed(0)
    rows_YX = torch.randn(sum(counts) + 2, 32).bfloat16().requires_grad_()  # two of no expert
    held = torch.randn(8, 16, 32).bfloat16() if transposed else torch.randn(8, 32, 16).bfloat16()
    weight_PXO = (held.mT if transposed else held).requires_grad_()
    ends_P = torch.tensor(counts).cumsum(0).to(torch.int32)
    output_YO = grouped_mm(rows_YX, weight_PXO, ends_P)
    grad_YO = torch.randn_like(output_YO)
    found = [output_YO, *torch.autograd.grad(output_YO, [rows_YX, weight_PXO], grad_YO)]
    output, of_rows, of_weight = torch.zeros(output_YO.shape), torch.zeros(rows_YX.shape), torch.zeros(8, 32, 16)
    for p, (start, end) in enumerate(pairwise([0, *ends_P.tolist()])):
        rows, grad, weight = rows_YX[start:end].float(), grad_YO[start:end].float(), weight_PXO[p].float()
        output[start:end], of_rows[start:end], of_weight[p] = rows @ weight, grad @ weight.T, rows.T @ grad
    for one, expected in zip(found, (output, of_rows, of_weight), strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), expected.detach(), rtol=2**-7, atol=2**-6)


def test_narrow_rows_of_a_cpu_come_in_whole_blocks(monkeypatch):
    seen = set()
    monkeypatch.setattr(block_product, "pad", lambda rows, by: seen.add(len(rows) + by[3]) or pad(rows, by))
    weight_PXO = torch.randn(1, 8, 8).bfloat16().requires_grad_()
    for rows in range(1, 130):
        grouped_mm(torch.randn(rows, 8).bfloat16(), weight_PXO, torch.tensor([rows])).sum().backward()
    assert seen == {BLOCK, 2 * BLOCK, 3 * BLOCK}
