"""Sorted rows through transformers' grouped product equal the experts module's own forward; others keep theirs."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from relibra.parallel.grouped_product import is_grouped, run_sorted
from relibra.parallel.rows.sorted_rows import SortedRows, one_expert, slot_ends
from relibra.planning.traffic.rank_tables import Place, home_tables
from tests.replay.tiny_models import CONFIGS, tiny_model

COUNTS = {"all slots": [3, 1, 4, 1, 5, 9, 2, 6], "empty slots": [0, 0, 7, 0, 0, 2, 0, 0], "one slot": [0] * 7 + [8]}


class OwnExperts(nn.Module):
    """Experts of any layout that `use_experts_implementation` knows."""

    def __init__(self, _config):
        super().__init__()
        self.num_experts, X, H = 8, 8, 16
        for name in ("gate_up_proj", "up_proj"):
            self.register_parameter(name, nn.Parameter(0.3 * torch.randn(8, X * (1 + name.startswith("gate")), H)))
        self.down_proj = nn.Parameter(0.3 * torch.randn(8, H, X))
        self.act_fn, self.post_expert_norm = nn.functional.silu, nn.LayerNorm(H)

    def forward(self, hidden_states, *_):
        return hidden_states + 1


def experts_of(kind, implementation="grouped_mm"):
    """Return experts of a tiny model, or of a layout that no tiny model has."""
    if kind in CONFIGS:
        model = tiny_model(kind, experts_implementation=implementation)
        return next(module for name, module in model.named_modules() if name.endswith(".experts"))
    layout = {"without gate": {"has_gate": False}, "with a norm": {"has_post_expert_norm": True}}[kind]
    made = use_experts_implementation(type("Made", (OwnExperts,), {"forward": OwnExperts.forward}), **layout)
    torch.manual_seed(0)
    return made(SimpleNamespace(_experts_implementation=implementation))


def sorted_forward(experts, rows, rows_YH, weight_Y1):
    return run_sorted(experts, rows_YH, rows, weight_Y1)


def own_forward(experts, rows, rows_YH, weight_Y1):
    return experts(rows_YH, rows.slot_Y.long().unsqueeze(1), weight_Y1)


def passes(experts, rows_YH, weight_Y1, run):
    """Return output and gradients of one way to run the experts."""
    leaves = [rows_YH.clone().requires_grad_(), weight_Y1.clone().requires_grad_()]
    output_YH = run(*leaves)
    used = [p for p in experts.parameters() if p.requires_grad]
    gradient = torch.randn(output_YH.shape, generator=torch.Generator().manual_seed(1)).to(output_YH.dtype)
    return [output_YH, *torch.autograd.grad(output_YH, [*leaves, *used], gradient, allow_unused=True)]


@pytest.mark.parametrize("kind", [*CONFIGS, "without gate", "with a norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_the_forward_of_the_module(kind, dtype):
    experts = experts_of(kind).to(dtype)
    assert is_grouped(experts.forward)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    for counts in COUNTS.values():
        slot_Y = torch.repeat_interleave(torch.arange(8), torch.tensor(counts))
        rows = SortedRows(slot_Y.int(), torch.tensor(counts).cumsum(0, dtype=torch.int32))
        rows_YH, weight_Y1 = torch.randn(len(slot_Y), hidden, dtype=dtype), torch.rand(len(slot_Y), 1)
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                sorted_ = passes(experts, rows_YH, weight_Y1, partial(sorted_forward, experts, rows))
                own = passes(experts, rows_YH, weight_Y1, partial(own_forward, experts, rows))
            exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(sorted_, own, **exact)


def test_other_experts_keep_their_forward():
    for implementation in ("eager", "batched_mm"):
        assert not is_grouped(experts_of("qwen3_moe", implementation).forward), implementation
    experts = experts_of("qwen3_moe")
    assert is_grouped(experts.forward)
    own = experts.forward
    assert not is_grouped(lambda *inputs: own(*inputs)), "something else is around it"
    assert not is_grouped(OwnExperts(None).forward), "a forward of its own"
    experts.config._experts_implementation = "eager"
    assert not is_grouped(experts.forward), "the configuration changed"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_live_rows_are_merged_by_slot(data):
    P, H = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3))
    counts_P = np.array(data.draw(st.lists(st.integers(0, 4), min_size=P + H, max_size=P + H)))
    live_V = np.array(data.draw(st.lists(st.integers(0, P - 1), max_size=7)), dtype=np.int64)
    slot_Y = np.repeat(np.arange(P + H), counts_P)
    rows = SortedRows(torch.from_numpy(slot_Y).int(), torch.from_numpy(counts_P.cumsum()).int())
    merged, order_Y = rows.with_live(torch.from_numpy(live_V), P, int(counts_P[:P].sum()))
    together = np.concatenate([live_V, slot_Y])
    expected = np.argsort(together, kind="stable")
    assert order_Y.tolist() == expected.tolist()
    assert merged.slot_Y.tolist() == together[expected].tolist()
    assert merged.ends_P.tolist() == np.bincount(together, minlength=P + H).cumsum().tolist()


def test_rows_of_some_slots():
    rows = SortedRows(torch.tensor([0, 0, 1, 3, 3, 3], dtype=torch.int32), torch.tensor([2, 3, 3, 6]).int())
    some = rows.of(slice(1, 4), slice(2, 6))
    assert some.slot_Y.tolist() == [0, 2, 2, 2]
    assert some.ends_P.tolist() == [1, 1, 4]
    assert one_expert(3, torch.device("cpu")).ends_P.tolist() == [3]


def test_ends_follow_from_the_tables():
    tokens_RE = np.array([[1, 0, 2, 5], [4, 3, 0, 0]])
    tables = [home_tables(tokens_RE, np.arange(4), Place(rank, 0, 0)) for rank in range(2)]
    assert [ends_P.tolist() for ends_P in slot_ends(tables, torch.device("cpu"))] == [[5, 8], [2, 7]]
