"""Batches in which responses share a prompt: the schedule that cuts them, rows, routes, counts, and log-probs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.cluster import cluster_preset
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.rl.batch.schedule import SharedPrompts, cut_into_runs, make_schedule
from relibra.rl.batch.step_plan import count_demand, gather_table, make_step_schedule, plan_together
from relibra.rl.batch.token_batch import compare_prompts, make_token_batch, with_routes
from relibra.rl.config.run_config import load_config
from relibra.rl.run.step_trace import trace_of
from relibra.rl.update.credit import make_value_batches
from relibra.rl.update.recompute import score_tokens
from relibra.routing.demand_rows import sample_of_rows
from tests.replay.tiny_models import tiny_model
from tests.rl.made_up import EXPERTS, LAYERS, TOP_K, mini_batch_of, response_of


def group_of(group, prompt, lengths, *, first=0, routes_differ=False, **common):
    """Return responses to one prompt, whose recordings of it agree unless `routes_differ`."""
    rng = np.random.default_rng(group)
    tokens, keys = rng.integers(3, 60, prompt), rng.random((prompt, LAYERS, EXPERTS))
    experts = keys.argsort(-1)[..., :TOP_K].astype(np.uint8)
    found = []
    for s, length in enumerate(lengths):
        one = response_of(first + s, prompt=prompt, length=length, group=group, **common)
        one.tokens_n[:prompt] = tokens
        if one.experts_mLK is not None and not (routes_differ and s):
            rows = min(prompt, len(one.experts_mLK))
            one.experts_mLK[:rows] = experts[:rows]
        found.append(one)
    return found


RESPONSES = [*group_of(0, 5, [4, 1, 6]), *group_of(1, 3, [2, 7], first=3), response_of(5, prompt=4, length=3)]
PIECES = np.array([0, 0, 0, 3, 3, 5])


def shared_batch(responses, piece_s, chosen=None, **options):
    chosen = range(len(responses)) if chosen is None else chosen
    return make_token_batch(responses, list(chosen), piece_s=piece_s, **options).to(torch.device("cpu"))


def test_a_prompt_is_fed_once_and_predicts_each_first_token():
    batch = shared_batch(RESPONSES[:3], PIECES[:3])
    first, second, third = RESPONSES[:3]
    assert batch.tokens_1T[0].tolist() == [*first.tokens_n[:-1], *third.tokens_n[5:-1]]
    assert batch.position_1T[0].tolist() == [*range(8), *range(5, 10)]
    assert batch.shared_B.tolist() == [0, 5, 5]
    assert batch.row_X.tolist() == [4, 5, 6, 7, 4, 4, *range(8, 13)]
    assert batch.target_X.tolist() == [*first.tokens_n[5:], *second.tokens_n[5:], *third.tokens_n[5:]]


def test_alone_the_layout_is_as_before():
    for responses in (RESPONSES, [RESPONSES[1]]):
        own = np.arange(len(responses))
        one, other = shared_batch(responses, own), make_token_batch(responses, own.tolist())
        for name in ("tokens_1T", "position_1T", "row_X", "token_X"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()


@pytest.fixture(scope="module")
def model():
    model = tiny_model().double().eval()
    model.set_experts_implementation("eager")  # grouped products know no float64
    return model


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4, 5], [2, 0, 1], [1], [1, 2]])
def test_log_probs_and_gradients_equal_those_of_each_alone(model, chosen):
    """The reference feeds each response by itself, in float64, except norms and routers, which the family casts."""
    batch = shared_batch(RESPONSES, PIECES, chosen)
    model.zero_grad()
    weight_X = torch.linspace(-1, 1, len(batch.row_X), dtype=torch.float64)
    expected = [score_tokens(model, make_token_batch(RESPONSES, [s]), 1.0).log_probs_X for s in chosen]
    found = score_tokens(model, batch, 1.0)
    torch.testing.assert_close(found.log_probs_X.double(), torch.cat(expected).double(), atol=1e-6, rtol=0)
    (found.log_probs_X * weight_X).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    (torch.cat(expected) * weight_X).sum().backward()
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(ours, parameter.grad, atol=1e-5, rtol=0)
    model.zero_grad()


def test_other_tokens_in_one_leave_the_others_alone(model):
    other = replace(RESPONSES[0], tokens_n=RESPONSES[0].tokens_n.copy())
    other.tokens_n[5:] = other.tokens_n[5:][::-1] + 1
    with torch.no_grad():
        one, two = (
            score_tokens(model, shared_batch([first, *RESPONSES[1:3]], PIECES[:3]), 1.0).log_probs_X
            for first in (RESPONSES[0], other)
        )
    torch.testing.assert_close(two[4:], one[4:], atol=1e-6, rtol=0)
    assert (one[1:4] - two[1:4]).abs().max() > 1e-3


def routed(batch, responses):
    experts = [responses[s].experts_mLK for s in batch.samples_B.tolist()]
    sizes = {"num_experts": EXPERTS, "layer_ids": range(LAYERS)}
    return compare_prompts(batch, experts).tolist(), with_routes(batch, experts, responses, **sizes).routes


def test_the_first_recording_of_a_prompt_stands_for_all():
    responses = group_of(0, 5, [4, 1, 6], routes_differ=True)
    (pairs, differing), routes = routed(shared_batch(responses, PIECES[:3]), responses)
    assert routes.experts_TLK.tolist() == [*responses[0].experts_mLK.tolist(), *responses[2].experts_mLK[5:].tolist()]
    assert routes.row_T.tolist() == [*range(8), *range(5, 10)]
    unlike = [
        set(one.experts_mLK[t, layer]) != set(responses[0].experts_mLK[t, layer])
        for one in responses[1:]
        for t in range(5)
        for layer in range(LAYERS)
    ]
    assert (pairs, differing) == (len(unlike), sum(unlike))
    assert routed(shared_batch(RESPONSES, PIECES), RESPONSES)[0] == [(2 * 5 + 3) * LAYERS, 0]


def test_another_prompt_than_that_of_the_group_is_refused():
    other = replace(RESPONSES[1], tokens_n=RESPONSES[1].tokens_n + 1)
    with pytest.raises(AssertionError, match="another prompt"):
        shared_batch([RESPONSES[0], other], PIECES[:2])


@st.composite
def steps(draw):
    """(tokens, unit, prompts, mini-batches, limit, ranks) of groups in the order of samples."""
    groups = draw(st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 40), min_size=1, max_size=6)),
                           min_size=1, max_size=8))  # fmt: skip
    prompt_S = np.array([prompt for prompt, own in groups for _ in own])
    group_S = np.array([g for g, (_, own) in enumerate(groups) for _ in own])
    tokens_S = prompt_S + np.array([rows for _, own in groups for rows in own])
    unit_S = group_S if draw(st.booleans()) else np.random.default_rng(len(group_S)).permutation(len(group_S))
    limit, ranks = draw(st.integers(1, 150)), draw(st.integers(1, 4))
    return tokens_S, unit_S, SharedPrompts(group_S, prompt_S), draw(st.integers(1, 4)), limit, ranks


@settings(max_examples=100, deadline=None)
@given(steps())
def test_pieces_share_a_place_and_count_their_prompt_once(step):
    tokens_S, unit_S, prompts, mini_batches, limit, ranks = step
    sizes = {"mini_batches": mini_batches, "micro_batch_tokens": limit, "num_ranks": ranks}
    schedule = make_schedule(tokens_S, unit_S, **sizes, prompts=prompts)
    apart = make_schedule(tokens_S, unit_S, **sizes)
    assert mini_batch_of(schedule).tolist() == mini_batch_of(apart).tolist(), "the draw of mini-batches stays"
    assert schedule.num_micro_batches <= 2 * apart.num_micro_batches
    for piece in np.unique(schedule.piece_S):
        members = np.flatnonzero(schedule.piece_S == piece)
        assert piece == members[0] == members[schedule.leads_S[members]], "the lowest sample leads"
        assert len({(schedule.micro_batch_S[s], schedule.rank_S[s], prompts.group_S[s]) for s in members}) == 1
    fed_S = np.where(schedule.leads_S, tokens_S, tokens_S - prompts.tokens_S)
    for m in range(schedule.num_micro_batches):
        for rank in range(ranks):
            here = (schedule.micro_batch_S == m) & (schedule.rank_S == rank)
            long = len(np.unique(schedule.piece_S[here])) == 1 and fed_S[here].sum() > limit
            assert fed_S[here].sum() <= limit or (long and (here.sum() == 1 or prompts.tokens_S[here][0] >= limit))


def test_pieces_are_large_where_ranks_do_not_wait_for_it():
    prompts = SharedPrompts(np.repeat(np.arange(4), 8), np.full(32, 10))
    sizes = {"mini_batches": 1, "num_ranks": 2, "prompts": prompts}
    schedule = make_schedule(np.full(32, 40), np.arange(32) // 8, micro_batch_tokens=130, **sizes)
    assert np.bincount(schedule.piece_S).max() == 4, "10 + 4 x 30 tokens"
    assert schedule.num_micro_batches == 4
    schedule = make_schedule(np.full(32, 40), np.arange(32) // 8, micro_batch_tokens=1000, **sizes)
    tokens_R = [int(np.where(schedule.leads_S, 40, 30)[schedule.rank_S == r].sum()) for r in range(2)]
    assert tokens_R == [500, 500], "two groups on each rank"


def test_runs_count_what_is_shared_once():
    assert cut_into_runs([5, 5, 5, 9], 11, [0, 3, 3, 0]) == [[0, 1, 2], [3]]
    assert cut_into_runs([5, 5, 5], 9, [0, 3, 3]) == [[0, 1, 2]]
    assert cut_into_runs([5, 5, 5], 8, [0, 3, 3]) == [[0, 1], [2]]


@pytest.mark.usefixtures("group")
def test_values_are_computed_behind_shared_prompts_too():
    responses = [RESPONSES[s] for s in (0, 3, 1, 4, 5, 2)]
    batches = make_value_batches(responses, range(6), 100, shares_prompts=True)
    [batch] = batches
    assert [responses[s].sample_id for s in batch.samples_B] == [0, 1, 2, 3, 4, 5]
    assert batch.tokens_1T.shape[1] == sum(len(one.tokens_n) - 1 for one in responses) - 2 * 5 - 3
    assert batch.target_X.tolist() == [token for one in RESPONSES for token in one.tokens_n[one.prompt_length :]]


CONFIG = load_config(
    None,
    ["parallel.ranks=1", "model.num_experts=8", "rollout.prompts_per_step=4", "rollout.responses_per_prompt=3",
     "update.mini_batches=2", "update.micro_batch_tokens=40", "algorithm.preset=grpo"],
)  # fmt: skip


@pytest.mark.usefixtures("group")
def test_the_demand_counts_a_prompt_with_its_first_response():
    responses = [one for g in range(4) for one in group_of(g, 6, [5, 9, 1], first=3 * g)]
    responses[4] = replace(responses[4], versions_r=responses[4].versions_r + 1)  # recorded by other weights
    table = gather_table(responses)
    schedule = make_step_schedule(table, CONFIG.update, by_group=True, seed=0, shares_prompts=True)
    sizes = {"num_experts": EXPERTS, "layer_ids": range(LAYERS), "top_k": TOP_K}
    demand = count_demand(responses, table, schedule, **sizes)
    fed_S = np.where(schedule.leads_S, table.tokens_S, table.tokens_S - table.prompt_S)
    assert demand.length_S.tolist() == fed_S.tolist()
    assert schedule.piece_S[4] == 4
    assert demand.piece_S.tolist() == schedule.piece_S.tolist()
    assert demand.attended_S.sum() < (table.tokens_S**2).sum()
    for m in range(schedule.num_micro_batches):
        chosen = np.flatnonzero(schedule.micro_batch_S == m)
        chosen = chosen[np.argsort(schedule.piece_S[chosen], kind="stable")].tolist()
        _, routes = routed(shared_batch(responses, schedule.piece_S, chosen), responses)
        counted_LE = np.stack(
            [np.bincount(routes.experts_TLK[:, n].flatten(), minlength=EXPERTS) for n in range(LAYERS)]
        )
        assert demand.tokens_MLRE[m, :, 0].tolist() == counted_LE.tolist()
    merged, place_S = demand.merged(schedule.piece_S)
    merged.validate()
    assert merged.tokens_MLRE is demand.tokens_MLRE
    assert merged.counts_SLE.sum(axis=0).tolist() == demand.counts_SLE.sum(axis=0).tolist()
    assert merged.attention_S[place_S[0]] == demand.attention_S[schedule.piece_S == 0].sum()
    cluster, expert = cluster_preset("h100x8", 1, 1), ExpertShape(hidden=64, width=32)
    planned = plan_together(demand, CONFIG.plan, cluster, expert, None, memory_gib=8.0).plan
    assert planned.scheduled(demand).micro_batch_S.tolist() == planned.micro_batch_S.tolist()
    for piece in np.unique(schedule.piece_S):
        assert len(set(planned.micro_batch_S[schedule.piece_S == piece].tolist())) == 1
    trace = trace_of(responses, num_experts=EXPERTS, layer_ids=range(LAYERS), source="test")
    sample_T = sample_of_rows(trace, demand)
    assert np.bincount(sample_T[sample_T >= 0], minlength=12).tolist() == fed_S.tolist(), "explain finds rows again"
