"""Every token goes to a rank once, and what is made of it there is what the routes and the plan say."""

from dataclasses import replace
from itertools import accumulate
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.parallel.rows import live_rows
from relibra.parallel.rows.exchange import AllToAll
from relibra.parallel.rows.prepared_rows import prepare_rows
from relibra.parallel.rows.row_lists import row_lists
from relibra.planning.traffic.rank_tables import Place, home_tables, rank_tables
from relibra.replay import BatchRoutes
from tests.parallel.rows.test_rank_tables import experts_in_slots
from tests.parallel.steps import random_step

CPU = torch.device("cpu")
seeds = st.integers(0, 2**32 - 1)
ranks = st.sampled_from([2, 4, 8])


class Sent(Exception):
    """Carries what a rank sends out of its collective."""


def prepared_on_all(tables_RL, experts_RTLK, *, kinds_R=None):
    """Run the collective of all ranks in one process: first each one up to its message, then with what it gets."""

    def send(sizes, rows):
        raise Sent(np.split(rows.numpy(), np.cumsum(sizes.send_R)[:-1]))

    def run(rank, move):
        tables_L, experts_TLK = tables_RL[rank], experts_RTLK[rank]
        with mock.patch.object(AllToAll, "move", move):
            routes = routes_of(tables_L, experts_TLK, *(kinds_R[rank] if kinds_R else ()))
            return prepare_rows(tables_L, routes, mock.Mock(spec=dist.ProcessGroup))

    sent_RR = []
    for rank in range(len(tables_RL)):
        with pytest.raises(Sent) as sent:
            run(rank, send)
        sent_RR.append(sent.value.args[0])
    result = []
    for rank in range(len(tables_RL)):
        mine = [sent_R[rank] for sent_R in sent_RR]

        def receive(sizes, _, mine=mine):
            assert sizes.receive_R == [len(message) for message in mine]
            return torch.from_numpy(np.concatenate(mine))

        result.append(run(rank, receive))
    return result


def routes_of(tables_L, experts_XLK, planned_X=None, live_V=()):
    """Return the routes of a batch with these planned and live rows; None: it has none."""
    if not len(experts_XLK):
        return None
    T = len(experts_XLK) + len(live_V)
    experts_TLK = np.tile(np.arange(experts_XLK.shape[2], dtype=np.uint8), (T, len(tables_L), 1))
    planned_X = np.arange(T) if planned_X is None else planned_X
    experts_TLK[planned_X] = experts_XLK
    routes = BatchRoutes.of_rows(
        [experts_TLK],
        num_experts=len(tables_L[0].tokens_E),
        layer_ids=[tables.place.layer_id for tables in tables_L],
        sample_ids=[0],
        weight_versions=[0],
    )
    valid_T = torch.zeros(T, dtype=torch.bool)
    valid_T[planned_X] = True
    return replace(routes, valid_T=valid_T)


def lists_of_all(tables_RL, experts_RTLK, **settings):
    return [rows.lists_on(CPU, rows.kinds) for rows in prepared_on_all(tables_RL, experts_RTLK, **settings)]


def micro_batches(seed, num_ranks, chunk=None):
    """Yield (micro-batch, tables and routes of every rank) of a random step."""
    case = random_step(seed, num_ranks)
    plan = case.plan
    for m in range(len(plan.replica_MLRB)):
        tables_RL = [
            [rank_tables(plan, case.demand, rank, m, layer, chunk) for layer in range(len(plan.layer_ids))]
            for rank in range(num_ranks)
        ]
        traces = [case.trace.select(case.batch(m, rank)[0]) for rank in range(num_ranks)]
        yield plan, m, tables_RL, [trace.experts_TLK[trace.valid_T].astype(np.int64) for trace in traces]


def pieces(rows, sizes):
    """Split rows by destination."""
    return [rows[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def tokens_to_ranks(lists):
    """Return the rows of the batch that go to each rank, where all ranks are one node."""
    (hop,) = lists.tokens.hops
    return pieces(hop.index_X.tolist(), hop.sizes.send_R)


def received_by(lists):
    (hop,) = lists.tokens.hops
    return hop.sizes.receive_R


@settings(deadline=None, max_examples=40)
@given(seeds, ranks)
def test_each_token_goes_to_each_rank_that_needs_it_once(seed, num_ranks):
    for _, _, tables_RL, experts_RTLK in micro_batches(seed, num_ranks):
        lists_RL = lists_of_all(tables_RL, experts_RTLK)
        top_k = experts_RTLK[0].shape[2]
        for source, lists_L in enumerate(lists_RL):
            for layer, lists in enumerate(lists_L):
                send_R = tables_RL[source][layer].send_RP.sum(axis=1).tolist()
                choices_R = pieces(lists.choice_X.tolist(), send_R)
                tokens_R = tokens_to_ranks(lists)
                for target in range(num_ranks):
                    assert tokens_R[target] == sorted({choice // top_k for choice in choices_R[target]})
                    assert received_by(lists_RL[target][layer])[source] == len(tokens_R[target])


@settings(deadline=None, max_examples=40)
@given(seeds, ranks)
def test_rows_that_arrive_once_are_expanded_to_choices(seed, num_ranks):
    """Rows carry (source, token); token-slots carry (source, choice): both say the same about every computed row."""
    for plan, m, tables_RL, experts_RTLK in micro_batches(seed, num_ranks):
        lists_RL = lists_of_all(tables_RL, experts_RTLK)
        top_k = experts_RTLK[0].shape[2]
        for layer, target in np.ndindex(len(plan.layer_ids), num_ranks):
            rows, choices = [], []
            for source in range(num_ranks):
                lists, tables = lists_RL[source][layer], tables_RL[source][layer]
                rows += [(source, t) for t in tokens_to_ranks(lists)[target]]
                sent = pieces(lists.choice_X.tolist(), tables.send_RP.sum(axis=1).tolist())[target]
                choices += [(source, choice) for choice in sent]
            own = lists_RL[target][layer]
            expert_P = experts_in_slots(plan, m, layer)[target]
            assert len(own.tokens.arrived_Y) == len(choices)
            for y, (row, arrived) in enumerate(
                zip(own.tokens.arrived_Y.tolist(), own.compute_order_Y.tolist(), strict=True)
            ):
                source, choice = choices[arrived]
                assert rows[row] == (source, choice // top_k)
                expert = experts_RTLK[source][choice // top_k, layer, choice % top_k]
                assert expert_P[own.slot_Y[y]] == expert


@settings(deadline=None, max_examples=20)
@given(seeds, ranks)
def test_prepared_lists_are_those_of_one_layer_alone(seed, num_ranks):
    for _, _, tables_RL, experts_RTLK in micro_batches(seed, num_ranks, chunk=4):
        lists_RL = lists_of_all(tables_RL, experts_RTLK)
        for tables_L, experts_TLK, lists_L in zip(tables_RL, experts_RTLK, lists_RL, strict=True):
            for layer, tables in enumerate(tables_L):
                lists, slow = lists_L[layer], row_lists(tables, experts_TLK[:, layer], CPU)
                assert slow.tokens is None
                assert lists.slot_Y.tolist() == slow.slot_Y.tolist()
                assert lists.compute_order_Y.tolist() == slow.compute_order_Y.tolist()
                assert lists.choice_X.tolist() == slow.choice_X.tolist()
                assert sorted(lists.choice_X.tolist()) == list(range(experts_TLK[:, layer].size))
                for run in pieces(lists.choice_X.tolist(), tables.send_RP.ravel().tolist()):
                    assert run == sorted(run)
                    assert len({experts_TLK[:, layer].ravel()[choice] for choice in run}) <= 1


@settings(deadline=None, max_examples=30)
@given(seeds, ranks, st.data())
def test_routes_that_are_not_those_of_the_tables_are_told_to_all(seed, num_ranks, data):
    """Also where the routes of a rank have as many rows, and where a rank lacks all of them."""
    _, _, tables_RL, experts_RTLK = next(micro_batches(seed, num_ranks))
    rank = data.draw(st.integers(0, num_ranks - 1))
    T, L, _ = experts_RTLK[rank].shape
    changed = experts_RTLK[rank].copy()
    kind = data.draw(st.sampled_from(["none", "one choice", "beyond the experts", "a row less"])) if T else "none"
    if kind in ("one choice", "beyond the experts"):
        t, layer = data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, L - 1))
        unused = [e for e in range(8) if e not in changed[t, layer]]
        changed[t, layer, 0] = 200 if kind == "beyond the experts" else data.draw(st.sampled_from(unused))
    elif kind == "a row less":
        changed = changed[1:]
    rows_R = prepared_on_all(tables_RL, [changed if r == rank else own for r, own in enumerate(experts_RTLK)])
    expected = [kind != "none" and r == rank for r in range(num_ranks)]
    assert all(rows.differs_R == expected for rows in rows_R)
    assert [rows.problem is not None for rows in rows_R] == expected


def test_two_experts_of_a_token_on_one_rank_share_a_row():
    experts_TK = np.array([[0, 1], [0, 2], [2, 3]])
    tokens_RE = np.array([[2, 1, 2, 1], [0, 0, 0, 0]])
    tables_RL = [[home_tables(tokens_RE, np.arange(4), Place(rank, 0, 0))] for rank in range(2)]
    (lists,), (other,) = lists_of_all(tables_RL, [experts_TK[:, None], np.zeros((0, 1, 2), dtype=int)])
    assert lists.choice_X.tolist() == [0, 2, 1, 3, 4, 5]  # experts 0, 0, 1 on rank 0, experts 2, 2, 3 on rank 1
    assert tokens_to_ranks(lists) == [[0, 1], [1, 2]]
    assert lists.tokens.arrived_Y.tolist() == [0, 1, 0]
    assert received_by(other) == [2, 0]
    assert other.tokens.arrived_Y.tolist() == [0, 1, 1]


@settings(deadline=None, max_examples=40)
@given(seeds, ranks, st.data())
def test_joined_live_rows_arrive_behind_planned_rows(seed, num_ranks, data):
    """Rows are labelled (source, row of the batch) and sent as the executor sends them."""
    for _, _, tables_RL, experts_RTLK in micro_batches(seed, num_ranks):
        rows = [data.draw(st.integers(0, 2)) if len(own) else 0 for own in experts_RTLK]
        kinds_R = []
        for own, live in zip(experts_RTLK, rows, strict=True):
            order = np.random.default_rng(seed).permutation(len(own) + live)
            kinds_R.append((np.sort(order[: len(own)]), np.sort(order[len(own) :])))
        with mock.patch.object(live_rows, "MOST_SHARE", 100):
            prepared_R = prepared_on_all(tables_RL, experts_RTLK, kinds_R=kinds_R)
        plain_RL = lists_of_all(tables_RL, experts_RTLK)
        assert all(one.live_travel_along == (sum(rows) > 0) and one.live_R == rows for one in prepared_R)
        lists_RL = [one.lists_on(CPU, one.kinds) for one in prepared_R]
        for layer in range(len(tables_RL[0])):
            sent_RR = [tokens_to_ranks(one[layer]) for one in lists_RL]
            for rank, own in enumerate(lists_RL):
                arrived = [(source, t) for source, sent_R in enumerate(sent_RR) for t in sent_R[rank]]
                assert received_by(own[layer]) == [len(sent_R[rank]) for sent_R in sent_RR]
                plain = [
                    (source, t)
                    for source, lists_L in enumerate(plain_RL)
                    for t in tokens_to_ranks(lists_L[layer])[rank]
                ]
                expected = [plain[i] for i in plain_RL[rank][layer].tokens.arrived_Y.tolist()]
                expected = [(source, int(kinds_R[source][0][t])) for source, t in expected]
                assert [arrived[i] for i in own[layer].tokens.arrived_Y.tolist()] == expected
                if sum(rows):
                    live = [(source, int(t)) for source, (_, live) in enumerate(kinds_R) for t in live]
                    assert [arrived[i] for i in own[layer].live.arrived_A.tolist()] == live
