"""Compiled loops over the rows of a micro-batch: which are sent, in which order, and what arrives for which slot.

All layers in one call, 32-bit numbers, without the interpreter lock: a thread prepares the next micro-batch while the
layers of this one run. `row_lists.py` says what the numbers mean; tests compare them with a slow reference.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from relibra.routing.compiled import compiled


@compiled
@no_type_check
def order_rows(experts_TLK, row_T, tokens_LE, send_LRP, first_LRP, choice_LX, token_Z, rows_LR, message_X) -> int:
    """Write which token-slots and which tokens go out, in which order, and which token each token-slot needs.

    row_T       row of the batch that each token is, ascending
    choice_LX   receives the token-slots of each layer, in the order of sending, as row of the batch x K + choice
    token_Z     receives the tokens of each layer, one layer after another; room for all token-slots
    rows_LR     receives the number of these tokens for each destination
    message_X   receives for each destination, after 3 + L other numbers, layer by layer, the row of each token-slot
                among the tokens that go there
    returns     first layer whose routes are not those that the tables count: the lists are then incomplete. -1: none
    """
    L, R, P = send_LRP.shape
    E, X = tokens_LE.shape[1], choice_LX.shape[1]
    written_R = np.full(R, 3 + L, np.int64)  # end of what is written for each destination
    for r in range(1, R):
        written_R[r] += written_R[r - 1] + send_LRP[:, r - 1].sum()
    run_Y3, run_E1 = np.empty((R * P, 3), np.int64), np.empty(E + 1, np.int64)
    token_X, end_Z = np.empty(X, np.int32), 0
    for layer in range(L):
        if tokens_LE[layer].sum() != X:
            return layer
        _list_runs(tokens_LE[layer], send_LRP[layer], first_LRP[layer], run_Y3, run_E1)
        choices_R = send_LRP[layer].sum(axis=1)
        first_R = np.cumsum(choices_R) - choices_R
        runs, sizes = (run_Y3, run_E1), (first_R, written_R - first_R, rows_LR[layer])
        if not _order_layer(experts_TLK[:, layer], row_T, runs, sizes, choice_LX[layer], token_X, message_X):
            return layer
        for r in range(R):
            sent = rows_LR[layer, r]
            token_Z[end_Z : end_Z + sent] = token_X[first_R[r] : first_R[r] + sent]
            end_Z += sent
            written_R[r] += choices_R[r]
    return -1


@compiled
@no_type_check
def _list_runs(tokens_E, send_RP, first_RP, run_Y3, run_E1) -> None:
    """Write the runs, each the token-slots of one expert that go to one local slot, by expert and position.

    run_Y3   receives where each begins in the order of sending, where it ends, and its destination
    run_E1   receives the first run of each expert
    """
    P, E = send_RP.shape[1], len(tokens_E)
    send_X, first_X = send_RP.ravel(), first_RP.ravel()
    used_Y = np.flatnonzero(send_X)
    used_Y = used_Y[np.argsort(first_X[used_Y])]
    end_X = np.cumsum(send_X)
    for j in range(len(used_Y)):
        x = used_Y[j]
        run_Y3[j, 0], run_Y3[j, 1], run_Y3[j, 2] = end_X[x] - send_X[x], end_X[x], x // P
    j, start = 0, 0
    for e in range(E):
        run_E1[e] = j
        start += tokens_E[e]
        while j < len(used_Y) and first_X[used_Y[j]] < start:
            j += 1
    run_E1[E] = j


@compiled
@no_type_check
def _order_layer(experts_TK, row_T, runs, sizes, choice_X, token_X, message_X) -> bool:
    """Write one layer of `order_rows`; return whether the routes are those that the runs count.

    Indices are unsigned, so that numba does not test whether they are negative, and the loop has no branch that routes
    decide: that halves its time.

    sizes     per destination: first token-slot; shift from a token-slot to its place in the message; rows (written)
    token_X   receives the tokens for each destination, from its first token-slot on
    """
    (run_Y3, run_E1), (first_R, shift_R, rows_R) = runs, sizes
    T, K = np.uint32(experts_TK.shape[0]), np.uint32(experts_TK.shape[1])
    E, one = np.uint64(len(run_E1) - 1), np.uint32(1)
    run_E4 = np.zeros((E, 4), np.uint32)  # next token-slot of an expert: its place, end of run, destination; next run
    run_E4[:, 3] = run_E1[:-1]
    sent_R4 = np.zeros((len(first_R), 4), np.uint32)  # last token + 1, rows, first_R, shift_R
    sent_R4[:, 2], sent_R4[:, 3] = first_R, shift_R
    for i in range(T):
        t = np.uint32(row_T[i])
        choice = t * K
        for k in range(K):
            e = np.uint64(experts_TK[i, k])
            if e >= E:
                return False
            x = run_E4[e, 0]
            if x == run_E4[e, 1]:
                j = run_E4[e, 3]
                if j == run_E1[e + np.uint64(1)]:
                    return False
                x = np.uint32(run_Y3[j, 0])
                run_E4[e, 1], run_E4[e, 2], run_E4[e, 3] = run_Y3[j, 1], run_Y3[j, 2], j + one
            run_E4[e, 0] = x + one
            r = np.uint64(run_E4[e, 2])
            row = sent_R4[r, 1] - np.uint32(sent_R4[r, 0] == t + one)  # that of the token, if it goes there already
            sent_R4[r, 0], sent_R4[r, 1] = t + one, row + one
            token_X[np.uint64(sent_R4[r, 2] + row)] = t
            message_X[np.uint64(sent_R4[r, 3] + x)] = row
            choice_X[np.uint64(x)] = choice
            choice += one
    rows_R[:] = sent_R4[:, 1]
    return True


@compiled
@no_type_check
def order_arrived(receive_LRP, compute_order_Y, slot_Y) -> None:
    """Write, for the rows that a rank computes, layer by layer, which arrived token-slot each is and its local slot."""
    L, R, P = receive_LRP.shape
    y = 0
    for layer in range(L):
        receive_RP = receive_LRP[layer].ravel()
        first_RP = np.cumsum(receive_RP) - receive_RP
        for p in range(P):
            for r in range(R):
                first, n = first_RP[r * P + p], receive_RP[r * P + p]
                for i in range(n):
                    compute_order_Y[y + i] = first + i
                slot_Y[y : y + n] = p
                y += n


@compiled
@no_type_check
def place_arrived(receive_LRP, rows_LR, messages_X, arrived_Y) -> None:
    """Write, for the rows that a rank computes, layer by layer, which arrived row is the input of each.

    rows_LR      rows from each source
    messages_X   of each source, after 3 + L other numbers, layer by layer, the row of each token-slot
    """
    L, R, P = receive_LRP.shape
    read_R = np.full(R, 3 + L, np.int64)  # next entry of each source
    for r in range(1, R):
        read_R[r] += read_R[r - 1] + receive_LRP[:, r - 1].sum()
    y = 0
    for layer in range(L):
        receive_RP = receive_LRP[layer].ravel()
        first_RP = np.cumsum(receive_RP) - receive_RP
        before_R = np.cumsum(rows_LR[layer]) - rows_LR[layer]
        for p in range(P):
            for r in range(R):
                n, row = receive_RP[r * P + p], before_R[r]
                read = read_R[r] + first_RP[r * P + p] - first_RP[r * P]
                for i in range(n):
                    arrived_Y[y + i] = row + messages_X[read + i]
                y += n
        for r in range(R):
            read_R[r] += receive_LRP[layer, r].sum()


@compiled
@no_type_check
def group_by_node(token_Z, send_LR, ranks_per_node, num_rows, token_Y, group_Z, rows_LN) -> int:
    """Write which tokens go to each node, from those that go to each rank.

    token_Z    tokens that go to each rank, layer by layer
    num_rows   above every token
    token_Y    receives the tokens of each layer, by node, each once per node and ascending; as long as token_Z
    group_Z    receives, for each entry of token_Z, its index among the entries of token_Y of its layer
    rows_LN    receives the number of tokens for each node
    returns    the entries of token_Y that were written
    """
    end_Z, end_Y, visits = 0, 0, 0
    visit_T, place_T = np.zeros(num_rows, np.int64), np.empty(num_rows, np.int32)
    for layer in range(send_LR.shape[0]):
        first_Y = end_Y
        for node in range(rows_LN.shape[1]):
            start_Z, start_Y = end_Z, end_Y
            end_Z += send_LR[layer, node * ranks_per_node : (node + 1) * ranks_per_node].sum()
            if end_Z > start_Z:
                visits += 1
                for z in range(start_Z, end_Z):
                    visit_T[token_Z[z]] = visits
                for t in range(num_rows):
                    if visit_T[t] == visits:
                        token_Y[end_Y], place_T[t] = t, end_Y - first_Y
                        end_Y += 1
                for z in range(start_Z, end_Z):
                    group_Z[z] = place_T[token_Z[z]]
            rows_LN[layer, node] = end_Y - start_Y
    return end_Y


@compiled
@no_type_check
def place_forwarded(rows_NL, send_NLG, message_X, forward_Y) -> None:
    """Write, layer by layer, which of the rows that came to a relay goes to each rank of its node.

    rows_NL     rows that came from each node
    send_NLG    rows from each node that go to each rank of the own node
    message_X   by source node, layer, own rank: the rows that go there, numbered within that node's rows of the layer
    forward_Y   receives the rows, numbered among all of the layer: by layer, own rank, source node, token
    """
    N, L, G = send_NLG.shape
    read_N = np.zeros(N, np.int64)  # next entry of each node
    for n in range(1, N):
        read_N[n] = read_N[n - 1] + send_NLG[n - 1].sum()
    f = 0
    for layer in range(L):
        for rank in range(G):
            before = 0
            for n in range(N):
                for _ in range(send_NLG[n, layer, rank]):
                    forward_Y[f] = before + message_X[read_N[n]]
                    read_N[n] += 1
                    f += 1
                before += rows_NL[n, layer]
