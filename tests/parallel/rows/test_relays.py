"""Relays get each token of their rail once, and forward what ranks of their node need, as slow references say."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.parallel.rows import live_rows
from relibra.parallel.rows.exchange import AllToAll
from relibra.parallel.rows.prepared_rows import prepare_rows
from relibra.parallel.rows.relays import SentRows, group_rows, renumber_arrived
from relibra.planning.traffic.rank_tables import micro_batch_tables
from tests.parallel.rows.test_row_lists import CPU, pieces, routes_of, seeds
from tests.parallel.steps import on_nodes, random_step

shapes = st.sampled_from([(2, 1), (1, 2), (2, 2), (2, 4), (4, 2), (4, 1)])


def on_threads(num_ranks, work):
    """Run work(rank) of all ranks, which exchange in memory; a rank that fails ends the others."""
    barrier, boxes = Barrier(num_ranks, timeout=60), {}

    def move(sizes, rows):
        rank = sizes.place.rank
        boxes[rank] = rows.contiguous().split(sizes.send_R)
        barrier.wait()
        mine = [boxes[source][rank] for source in range(num_ranks)]
        barrier.wait()
        assert [len(one) for one in mine] == sizes.receive_R
        return torch.cat(mine)

    def run(rank):
        try:
            return work(rank)
        except BaseException:
            barrier.abort()
            raise

    with mock.patch.object(AllToAll, "move", move), ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


def lists_of_all(case, m, dispatch, live_R=None):
    """Return the lists of each rank and layer; live rows are last in a batch and join the others."""
    plan, group = case.plan, mock.Mock(spec=dist.ProcessGroup)

    def prepare(rank):
        trace = case.trace.select(case.batch(m, rank)[0])
        experts_TLK = trace.experts_TLK[trace.valid_T].astype(np.int64)
        live = live_R[rank] if live_R and len(experts_TLK) else 0
        kinds = (np.arange(len(experts_TLK)), len(experts_TLK) + np.arange(live)) if live else ()
        tables_L = micro_batch_tables(plan, case.demand, rank, m)
        routes = routes_of(tables_L, experts_TLK, *kinds)
        rows = prepare_rows(tables_L, routes, group, dispatch=dispatch)
        return rows.lists_on(CPU, rows.kinds)

    with mock.patch.object(live_rows, "MOST_SHARE", 100):
        return on_threads(plan.num_ranks, prepare)


def moved(lists_R, rows_R):
    """Return, for each rank, what its computed and its live rows are; and what each copy and hop brought, by rank."""
    brought = []
    if lists_R[0].tokens.by_node_X is not None:
        copied_R = [lists.tokens.by_node_X.tolist() for lists in lists_R]
        rows_R = [[rows[i] for i in copied] for copied, rows in zip(copied_R, rows_R, strict=True)]
        brought.append(rows_R)
    for number in range(len(lists_R[0].tokens.hops)):
        hops_R = [lists.tokens.hops[number] for lists in lists_R]
        rows_R = [[rows[i] for i in hop.index_X.tolist()] for hop, rows in zip(hops_R, rows_R, strict=True)]
        sent_RR = [pieces(rows, hop.sizes.send_R) for hop, rows in zip(hops_R, rows_R, strict=True)]
        if hops_R[0].sizes.all_stay:
            assert all(not sent for s, sent_R in enumerate(sent_RR) for d, sent in enumerate(sent_R) if s != d)
        for rank, hop in enumerate(hops_R):
            assert hop.sizes.receive_R == [len(sent_R[rank]) for sent_R in sent_RR]
        rows_R = [[row for sent_R in sent_RR for row in sent_R[rank]] for rank in range(len(lists_R))]
        brought.append(rows_R)
    computed = [[rows[i] for i in lists.tokens.arrived_Y.tolist()] for lists, rows in zip(lists_R, rows_R, strict=True)]
    live = [
        [] if lists.live is None else [rows[i] for i in lists.live.arrived_A.tolist()]
        for lists, rows in zip(lists_R, rows_R, strict=True)
    ]
    return computed, live, brought


@settings(deadline=None, max_examples=40)
@given(seeds, shapes, st.booleans())
def test_relays_bring_what_a_flat_dispatch_brings(seed, shape, with_live):
    """Rows are labelled (source, row of the batch) and moved as the executor moves them."""
    N, G = shape
    drawn = random_step(seed, N * G)
    live_R = np.random.default_rng(seed).integers(0, 3, N * G).tolist() if with_live else None
    for m in range(len(drawn.plan.replica_MLRB)):
        of_ways = {
            "one node": lists_of_all(drawn, m, "flat", live_R),
            "flat": lists_of_all(on_nodes(drawn, N), m, "flat", live_R),
            "hierarchical": lists_of_all(on_nodes(drawn, N), m, "hierarchical", live_R),
        }
        labels_R = [[(rank, t) for t in range(1000)] for rank in range(N * G)]
        for layer in range(len(drawn.plan.layer_ids)):
            found = {way: moved([one[layer] for one in lists], labels_R) for way, lists in of_ways.items()}
            assert found["hierarchical"][:2] == found["flat"][:2]
            if N == 1:
                assert found["flat"] == found["one node"]
            flat, hierarchical = found["flat"][2], found["hierarchical"][2]
            assert [len(hops) for hops in (flat, hierarchical)] == [1 + (N > 1)] * 2
            for rank in range(N * G) if N > 1 else ():
                node, number = divmod(rank, G)
                needed = {row for d in range(node * G, node * G + G) for row in flat[1][d] if row[0] % G == number}
                assert hierarchical[0][rank] == sorted(needed)
                assert sorted(hierarchical[1][rank]) == sorted(flat[1][rank])


@settings(deadline=None, max_examples=100)
@given(seeds, shapes)
def test_tokens_are_grouped_by_node_as_the_slow_reference_says(seed, shape):
    (N, G), rng = shape, np.random.default_rng(seed)
    L, T = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    tokens_LR = [[np.flatnonzero(rng.random(T) < 0.4) for _ in range(N * G)] for _ in range(L)]
    send_LR = np.array([[len(tokens) for tokens in tokens_R] for tokens_R in tokens_LR])
    found = group_rows([np.concatenate(tokens_R).astype(np.int32) for tokens_R in tokens_LR], send_LR, G)
    for layer, tokens_R in enumerate(tokens_LR):
        of_node_N = [sorted({int(t) for r in range(n * G, n * G + G) for t in tokens_R[r]}) for n in range(N)]
        rows = [(n, t) for n, of_node in enumerate(of_node_N) for t in of_node]
        assert found.token_L[layer].tolist() == [t for _, t in rows]
        assert found.rows_LN[layer].tolist() == [len(of_node) for of_node in of_node_N]
        expected = [rows.index((r // G, int(t))) for r, tokens in enumerate(tokens_R) for t in tokens]
        assert found.group_L[layer].tolist() == expected


@settings(deadline=None, max_examples=100)
@given(seeds, shapes)
def test_arrived_rows_are_renumbered_as_the_slow_reference_says(seed, shape):
    (N, G), rng = shape, np.random.default_rng(seed)
    receive_LR = rng.integers(0, 4, (2, N * G))
    rows = SentRows(
        [], receive_LR, receive_LR, [rng.integers(0, max(1, n), 9 * (n > 0)) for n in receive_LR.sum(1)], []
    )
    found = renumber_arrived(rows, G)
    for receive_R, before_Y, after_Y in zip(receive_LR, rows.arrived_L, found.arrived_L, strict=True):
        by_source = [(source, i) for source, n in enumerate(receive_R) for i in range(n)]
        by_rail = [(n * G + g, i) for g in range(G) for n in range(N) for i in range(receive_R[n * G + g])]
        assert [by_rail[y] for y in after_Y] == [by_source[y] for y in before_Y]
