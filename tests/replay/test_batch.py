import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.replay import BatchRoutes
from relibra.routing.trace import RoutingTrace, hash_tokens
from tests.replay.tiny_models import random_experts, random_trace

LAYERS = [1, 3]


@st.composite
def batches(draw):
    """Samples with lost rows here and there, some in wire form, and where their tokens stand in a padded batch."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    seed = draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 50, n) for n in lengths]
    routes, valid, hashed = [], [], []
    for s, n in enumerate(lengths):
        wire = n > 1 and draw(st.booleans())
        rows = n - 1 if wire else n
        lost = [draw(st.booleans()) and draw(st.booleans()) for _ in range(rows)]
        if wire:
            lost[-1] = False
        routes.append(random_experts(rows, len(LAYERS), 8, 3, seed + s))
        valid.append(~np.array(lost))
        hashed.append(tokens[s][:rows])
    trace = RoutingTrace.from_samples(
        routes, num_experts=8, layer_ids=LAYERS, valid=valid, tokens=hashed, sample_ids=range(10, 10 + len(lengths))
    )
    width = max(lengths) + draw(st.integers(0, 2))
    starts = [draw(st.sampled_from([0, width - n])) for n in lengths]
    return trace, tokens, width, starts


def expected_rows(trace, tokens):
    """For each sample and token: the row to replay, or None to run native. Slow and obvious."""
    plan = []
    for s, sample_tokens in enumerate(tokens):
        rows = range(*trace.sample_rows(s).indices(trace.num_rows))
        wanted = [rows[t] if t < len(rows) and trace.valid_T[rows[t]] else None for t in range(len(sample_tokens))]
        plan.append([None] * len(wanted) if None in wanted[:-1] else wanted)
    return plan


def check(routes, trace, batch_rows, plan):
    """Hold a layout against the plan; `batch_rows[b]` is (sample, token) or None for padding."""
    assert routes.num_rows == len(batch_rows)
    for b, place in enumerate(batch_rows):
        row = None if place is None else plan[place[0]][place[1]]
        assert bool(routes.valid_T[b]) == (row is not None)
        wanted = np.tile(np.arange(3), (2, 1)) if row is None else trace.experts_TLK[row]
        assert routes.experts_TLK[b].tolist() == wanted.tolist()
        assert routes.name_row(b) == ("padding" if place is None else f"sample {10 + place[0]}, row {place[1]}")
    due = [row for sample in plan for row in sample[:-1]]
    assert routes.coverage == pytest.approx(sum(r is not None for r in due) / len(due) if due else 1.0)
    assert routes.fallback_samples == tuple(s for s, rows in enumerate(plan) if None in rows[:-1])


@settings(deadline=None, max_examples=60)
@given(batches())
def test_padded_puts_every_row_on_its_token(batch):
    trace, tokens, width, starts = batch
    mask_BN = torch.zeros(len(tokens), width, dtype=torch.long)
    ids_BN = torch.zeros(len(tokens), width, dtype=torch.long)
    batch_rows = [None] * mask_BN.numel()
    for s, (start, sample_tokens) in enumerate(zip(starts, tokens, strict=True)):
        mask_BN[s, start : start + len(sample_tokens)] = 1
        ids_BN[s, start : start + len(sample_tokens)] = torch.from_numpy(sample_tokens)
        for t in range(len(sample_tokens)):
            batch_rows[s * width + start + t] = (s, t)
    check(BatchRoutes.padded(trace, mask_BN, ids_BN), trace, batch_rows, expected_rows(trace, tokens))


@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(0, 3), st.booleans())
def test_packed_puts_samples_one_after_another(batch, padding, with_lengths):
    trace, tokens, *_ = batch
    if not with_lengths:  # then a pack has one row per token
        tokens = [t[:n] for t, n in zip(tokens, trace.rows_per_sample, strict=True)]
    batch_rows = [(s, t) for s, sample in enumerate(tokens) for t in range(len(sample))] + [None] * padding
    ids_1T = torch.from_numpy(np.concatenate([*tokens, np.zeros(padding, dtype=np.int64)])).unsqueeze(0)
    lengths = [len(t) for t in tokens] if with_lengths else None
    routes = BatchRoutes.packed(trace, rows=len(batch_rows), input_ids_T=ids_1T, lengths=lengths)
    check(routes, trace, batch_rows, expected_rows(trace, tokens))


def wire_form(lengths, tokens=None):
    return RoutingTrace.from_samples(
        [random_experts(n - 1, 2, 8, 3, s) for s, n in enumerate(lengths)],
        num_experts=8,
        layer_ids=LAYERS,
        tokens=None if tokens is None else [t[:-1] for t in tokens],
        sample_ids=range(10, 10 + len(lengths)),
    )


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("padding", [0, 1, 2, 5])
def test_a_pack_whose_trace_leaves_out_last_tokens_needs_lengths(padding, hashed):
    lengths = [3, 5, 1]
    tokens = [np.arange(3), np.arange(20, 25), np.array([40])]
    trace = wire_form(lengths, tokens if hashed else None)
    ids_T = torch.from_numpy(np.concatenate([*tokens, np.zeros(padding, dtype=np.int64)]))
    routes = BatchRoutes.packed(trace, input_ids_T=ids_T, lengths=lengths)
    batch_rows = [(s, t) for s, n in enumerate(lengths) for t in range(n)] + [None] * padding
    check(routes, trace, batch_rows, expected_rows(trace, tokens))
    with pytest.raises(TraceError, match=r"tokens of each sample as `lengths`|other `lengths`: pass them"):
        BatchRoutes.packed(trace, input_ids_T=ids_T)


def test_padding_that_cannot_be_last_tokens_needs_no_lengths():
    full, _ = two_samples()  # its last rows are there, marked invalid
    assert BatchRoutes.packed(full, rows=15).coverage == 1.0
    assert BatchRoutes.packed(wire_form([3, 5]), rows=7).valid_T.tolist() == [True] * 6 + [False]


def test_lengths_that_do_not_fit_the_trace_are_refused():
    trace, _ = two_samples()
    with pytest.raises(TraceError, match="'lengths' has 1 samples, the trace 2"):
        BatchRoutes.packed(trace, lengths=[10])
    with pytest.raises(TraceError, match="sample 1: the trace has 4 rows, the batch 6 tokens"):
        BatchRoutes.packed(trace, lengths=[6, 6])


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (40_000, torch.int32)])
def test_ids_stay_narrow(num_experts, dtype):
    experts = np.array([[[num_experts - 1, 0]], [[5, 3]]])
    routes = BatchRoutes.packed(RoutingTrace.from_samples([experts], num_experts=num_experts), rows=3)
    assert routes.experts_TLK.dtype == dtype
    assert routes.experts_TLK.tolist() == [*experts.tolist(), [[0, 1]]]


def two_samples(lengths=(6, 4)):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 50, n) for n in lengths]
    return random_trace(list(lengths), layer_ids=LAYERS, top_k=3, tokens=tokens), tokens


def as_batch(tokens):
    width = max(map(len, tokens))
    ids_BN = torch.zeros(len(tokens), width, dtype=torch.long)
    mask_BN = torch.zeros_like(ids_BN)
    for b, sample in enumerate(tokens):
        ids_BN[b, : len(sample)] = torch.from_numpy(sample)
        mask_BN[b, : len(sample)] = 1
    return mask_BN, ids_BN


def rebuild(trace, rows_of, hashes=None):
    """Return the trace with the rows of sample 1 chosen anew, as a faulty recorder would leave them."""
    rows = np.concatenate([np.arange(trace.offsets[1]), trace.offsets[1] + np.asarray(rows_of)])
    return RoutingTrace(
        **{
            **vars(trace),
            "experts_TLK": trace.experts_TLK[rows],
            "valid_T": np.ones(len(rows), dtype=bool),
            "token_hash_T": trace.token_hash_T[rows] if hashes is None else hashes,
            "offsets": np.array([0, trace.offsets[1], len(rows)]),
            "prompt_lengths": np.zeros(2, dtype=np.int64),
        }
    )


def test_a_dropped_row_is_an_error_by_its_number_alone():
    trace, tokens = two_samples()
    lost = RoutingTrace.from_samples(
        [trace.experts_TLK[:6], trace.experts_TLK[6:9]],
        num_experts=8,
        layer_ids=LAYERS,
        valid=[trace.valid_T[:6], np.array([True, True, False])],
    )
    mask_BN, _ = as_batch(tokens)
    with pytest.raises(TraceError, match=r"sample 1: the trace has 3 rows, the batch 4 tokens \(its last row"):
        BatchRoutes.padded(lost, mask_BN)


def test_a_dropped_row_is_named_by_its_hash():
    trace, tokens = two_samples()
    mask_BN, ids_BN = as_batch(tokens)
    found = r"sample 1, row 1, layers 1 to 3: .* fit the next token: a row was dropped"
    with pytest.raises(TraceError, match=found):
        BatchRoutes.padded(rebuild(trace, [0, 2, 3]), mask_BN, ids_BN)
    own_hash = np.concatenate([trace.token_hash_T[:6], hash_tokens(tokens[1][[0, 2, 3]])])
    with pytest.raises(TraceError, match=found):
        BatchRoutes.padded(rebuild(trace, [0, 2, 3], own_hash), mask_BN, ids_BN)


def test_rows_shifted_by_one_are_named_by_their_hash():
    trace, tokens = two_samples()
    mask_BN, ids_BN = as_batch(tokens)
    with pytest.raises(TraceError, match=r"sample 1, row 0, layers 1 to 3: .* fit the next token"):
        BatchRoutes.padded(rebuild(trace, [1, 2, 3, 0]), mask_BN, ids_BN)
    with pytest.raises(TraceError, match=r"sample 1, row 1, layers 1 to 3: .* fit the previous token"):
        BatchRoutes.padded(rebuild(trace, [0, 0, 1, 2]), mask_BN, ids_BN)
    with pytest.raises(TraceError, match=r"sample 0, row 0, .* shifting the rows by one does not help"):
        BatchRoutes.padded(trace, mask_BN, 60 - ids_BN)


def test_rows_shifted_in_a_pack_are_named_too():
    trace, tokens = two_samples()
    ids_T = torch.from_numpy(np.concatenate(tokens))
    with pytest.raises(TraceError, match=r"sample 1, row 0, .* fit the next token"):
        BatchRoutes.packed(rebuild(trace, [1, 2, 3]), rows=10, input_ids_T=ids_T)


def test_batches_of_another_size_are_refused():
    trace, tokens = two_samples()
    mask_BN, ids_BN = as_batch(tokens)
    with pytest.raises(TraceError, match="2 samples, the batch 1 rows"):
        BatchRoutes.padded(trace, mask_BN[:1])
    with pytest.raises(TraceError, match="12 tokens, the batch 10 rows"):
        BatchRoutes.packed(trace, rows=10, input_ids_T=ids_BN)
    with pytest.raises(TraceError, match="10 rows together, the packed batch 9"):
        BatchRoutes.packed(trace, rows=9)
    with pytest.raises(TraceError, match="sample 0: the trace has 6 rows, the batch 4 tokens"):
        BatchRoutes.padded(trace, torch.ones(2, 4))


def test_ids_of_a_type_that_may_not_fit_are_refused():
    facts = {"num_experts": 8, "layer_ids": [0], "sample_ids": [7], "weight_versions": [0]}
    ids_mLK = np.zeros((3, 1, 2), dtype=np.uint16)
    assert BatchRoutes.of_rows([ids_mLK], **facts).experts_TLK.dtype == torch.uint8
    with pytest.raises(TraceError, match=r"samples \[7\]: expert ids are int64, .* 8 experts have to be uint8"):
        BatchRoutes.of_rows([ids_mLK.astype(np.int64)], **facts)
