"""`BatchRoutes`: recorded routes, row by row as the routers of one training batch see its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64, Integer, Shaped
from numpy import ndarray
from torch import Tensor

from relibra.errors import TraceError
from relibra.routing.trace import RoutingTrace, hash_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRoutes:
    """Routes of one batch of `T` rows: `B*N` for a padded batch, the length of the pack for a packed one.

    experts_TLK       logical ids, uint8 up to 256 experts else int32; rows that are not replayed hold 0, 1, ..., K-1
    valid_T           rows to replay; the others follow the router: padding, a last token that was never fed to
                      the engine, and every row of a fallback sample
    layer_ids         absolute decoder layer of each entry of the layer axis
    num_experts       experts per layer
    sample_T, row_T   of each batch row: its sample in the trace, and its row in that sample; -1 for padding
    sample_ids        ids of the samples, for messages
    weight_versions   policy version that routed each sample
    fallback_samples  positions of samples without any replayed row, because rows other than the last are missing:
                      a sample replayed in part would follow neither policy
    coverage          share of the rows to be replayed (all but the last of each sample) that are replayed
    """

    experts_TLK: Integer[Tensor, "T L K"]
    valid_T: Bool[Tensor, " T"]
    layer_ids: tuple[int, ...]
    num_experts: int
    sample_T: Int64[Tensor, " T"]
    row_T: Int64[Tensor, " T"]
    sample_ids: tuple[int, ...]
    weight_versions: tuple[int, ...]
    fallback_samples: tuple[int, ...]
    coverage: float

    @classmethod
    def padded(
        cls,
        trace: RoutingTrace,
        attention_mask_BN: Shaped[Tensor, "B N"],
        input_ids_BN: Integer[Tensor, "B N"] | None = None,
    ) -> BatchRoutes:
        """Return the routes of a batch whose row `b` is sample `b` of the trace, padded on either side.

        attention_mask_BN   non-zero for tokens
        input_ids_BN        compared with the token hash of the trace, if it has one, to detect shifted rows
        raises              TraceError when the rows of a sample do not fit its tokens, or the trace is illegal
        """
        B, N = attention_mask_BN.shape
        if trace.num_samples != B:
            raise TraceError(
                f"the trace has {trace.num_samples} samples, the batch {B} rows: select the batch's samples"
            )
        mask_BN = attention_mask_BN.detach().cpu().numpy() != 0
        return _lay_out(trace, mask_BN.sum(axis=1), np.flatnonzero(mask_BN), B * N, _to_flat(input_ids_BN, B * N))

    @classmethod
    def packed(
        cls,
        trace: RoutingTrace,
        rows: int | None = None,
        input_ids_T: Integer[Tensor, "*T"] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> BatchRoutes:
        """Return the routes of a pack: the samples of the trace one after another, then padding up to `rows`.

        rows          rows of the batch; default: the length of `input_ids_T`, or the samples without padding
        input_ids_T   checked as in `padded`; a leading batch axis of 1 is fine
        lengths       tokens of each sample in the pack (differences of `cu_seqlens`); default: its rows in the trace.
                      Give them when the trace leaves out last tokens, as engines do
        raises        TraceError as `padded`, or, without `lengths`, where padding may be last tokens of samples
        """
        lengths_S = trace.rows_per_sample if lengths is None else np.asarray(lengths, dtype=np.int64)
        if len(lengths_S) != trace.num_samples:
            raise TraceError(f"'lengths' has {len(lengths_S)} samples, the trace {trace.num_samples}: pass one each")
        total = int(lengths_S.sum())
        if rows is None:
            rows = total if input_ids_T is None else input_ids_T.numel()
        if total > rows:
            raise TraceError(
                f"the samples {trace.sample_ids.tolist()} have {total} rows together, the packed batch {rows}: "
                "pack the same samples that the trace holds"
            )
        if lengths is None and (input_ids_T is None or trace.token_hash_T is None):
            _refuse_ambiguous_pack(trace, rows)
        return _lay_out(trace, lengths_S, np.arange(total), rows, _to_flat(input_ids_T, rows))

    @classmethod
    def of_rows(
        cls,
        experts_S: Sequence[Shaped[ndarray, "_ L K"]],
        *,
        num_experts: int,
        layer_ids: Sequence[int],
        sample_ids: Sequence[int],
        weight_versions: Sequence[int],
        first_rows: Sequence[int] | None = None,
    ) -> BatchRoutes:
        """Return the rows of several samples end to end, all of them to be replayed; copies the routes once.

        experts_S   ids `[m, L, K]` of each sample, one row per fed token, checked before (`RoutingTrace.validate`)
        first_rows  row of each sample that its ids begin with, for messages; None: 0
        raises      TraceError for ids of a type that may not fit, such as int64 for up to 256 experts
        """
        dtype = np.dtype(np.uint8 if num_experts <= 256 else np.int32)
        try:
            experts_TLK = np.concatenate(experts_S, dtype=dtype)
        except TypeError as error:
            types = ", ".join(sorted({str(ids.dtype) for ids in experts_S}))
            raise TraceError(
                f"samples {list(sample_ids)}: expert ids are {types}, and those of {num_experts} experts have to be "
                f"{dtype}: convert them with astype"
            ) from error
        rows = [len(experts_mLK) for experts_mLK in experts_S]
        first_rows = [0] * len(rows) if first_rows is None else first_rows
        return cls(
            experts_TLK=torch.from_numpy(experts_TLK),
            valid_T=torch.ones(len(experts_TLK), dtype=torch.bool),
            layer_ids=tuple(layer_ids),
            num_experts=num_experts,
            sample_T=torch.from_numpy(np.repeat(np.arange(len(rows)), rows)),
            row_T=torch.from_numpy(np.concatenate(list(map(np.arange, first_rows, np.add(first_rows, rows))))),
            sample_ids=tuple(sample_ids),
            weight_versions=tuple(weight_versions),
            fallback_samples=(),
            coverage=1.0,
        )

    @property
    def num_rows(self) -> int:
        """Return the rows of the batch, padding included, `T`."""
        return self.experts_TLK.shape[0]

    @property
    def top_k(self) -> int:
        """Return the choices per token, `K`."""
        return self.experts_TLK.shape[2]

    def name_row(self, row: int) -> str:
        """Return the name of a batch row: its sample and row, or padding."""
        sample = int(self.sample_T[row])
        return "padding" if sample < 0 else f"sample {self.sample_ids[sample]}, row {int(self.row_T[row])}"


def _lay_out(
    trace: RoutingTrace,
    lengths_S: Int[ndarray, " S"],
    positions_n: Int[ndarray, " n"],
    num_rows: int,
    tokens_T: Int[ndarray, " T"] | None,
) -> BatchRoutes:
    """Place the rows of the trace at their tokens in the batch.

    lengths_S     tokens of each sample in the batch
    positions_n   batch row of every token, sample by sample
    """
    trace.validate()
    _check_lengths(trace, lengths_S)
    starts_S = np.cumsum(lengths_S) - lengths_S
    sample_n = np.repeat(np.arange(trace.num_samples), lengths_S)
    row_n = np.arange(len(positions_n)) - starts_S[sample_n]
    if tokens_T is not None and trace.token_hash_T is not None:
        for s in range(trace.num_samples):
            _check_tokens(trace, s, tokens_T[positions_n[starts_S[s] : starts_S[s] + lengths_S[s]]])

    # False for the last token of a sample, which engines leave out.
    recorded_n = row_n < trace.rows_per_sample[sample_n]
    source_n = trace.offsets[sample_n] + np.where(recorded_n, row_n, 0)
    valid_n = np.zeros(len(positions_n), dtype=bool)
    valid_n[recorded_n] = trace.valid_T[source_n[recorded_n]]
    expected_n = row_n < lengths_S[sample_n] - 1
    fallback = np.unique(sample_n[expected_n & ~valid_n])
    valid_n &= ~np.isin(sample_n, fallback)

    dtype = np.uint8 if trace.num_experts <= 256 else np.int32  # torch has few operations on uint16
    experts_TLK = np.empty((num_rows, trace.num_layers, trace.top_k), dtype=dtype)
    experts_TLK[:] = np.arange(trace.top_k)
    experts_TLK[positions_n[valid_n]] = trace.experts_TLK[source_n[valid_n]]
    valid_T = np.zeros(num_rows, dtype=bool)
    sample_T, row_T = np.full((2, num_rows), -1, dtype=np.int64)
    valid_T[positions_n], sample_T[positions_n], row_T[positions_n] = valid_n, sample_n, row_n
    return BatchRoutes(
        experts_TLK=torch.from_numpy(experts_TLK),
        valid_T=torch.from_numpy(valid_T),
        layer_ids=tuple(trace.layer_ids.tolist()),
        num_experts=trace.num_experts,
        sample_T=torch.from_numpy(sample_T),
        row_T=torch.from_numpy(row_T),
        sample_ids=tuple(trace.sample_ids.tolist()),
        weight_versions=tuple(trace.weight_versions.tolist()),
        fallback_samples=tuple(fallback.tolist()),
        coverage=float((valid_n & expected_n).sum() / expected_n.sum()) if expected_n.any() else 1.0,
    )


def _check_lengths(trace: RoutingTrace, lengths_S: Int[ndarray, " S"]) -> None:
    """Raise TraceError unless a sample of n tokens has n rows, or n - 1 without the last one, as engines send them."""
    for s, (rows, tokens) in enumerate(zip(trace.rows_per_sample.tolist(), lengths_S.tolist(), strict=True)):
        if rows == tokens or (rows == tokens - 1 and (rows == 0 or trace.valid_T[trace.offsets[s + 1] - 1])):
            continue
        hint = " (its last row is marked invalid already, so another row is lost)" if rows == tokens - 1 else ""
        raise TraceError(
            f"sample {trace.sample_ids[s]}: the trace has {rows} rows, the batch {tokens} tokens{hint}; allowed are "
            f"{tokens} rows, or {tokens - 1} that leave out the last token: train on the tokens that were recorded"
        )


def _refuse_ambiguous_pack(trace: RoutingTrace, rows: int) -> None:
    """Raise TraceError if the trace may have left out the last token of each sample of a pack with room for them."""
    S = trace.num_samples
    if 1 < S <= rows - trace.num_rows and all(trace.valid_T[trace.sample_rows(s)][-1:].all() for s in range(S)):
        raise TraceError(
            f"the packed batch has {rows} rows, the trace {trace.num_rows} rows in {S} samples: the others are either "
            "padding, or the samples' last tokens, left out of the trace; pass the tokens of each sample as `lengths`"
        )


def _check_tokens(trace: RoutingTrace, sample: int, tokens_n: Int[ndarray, " n"]) -> None:
    """Compare the token hash of each valid row with the token that it is replayed on.

    raises   TraceError with sample, first row and layers, and whether the rows fit when shifted by one
    """
    rows = trace.sample_rows(sample)
    assert trace.token_hash_T is not None
    got_n, valid_n = trace.token_hash_T[rows], trace.valid_T[rows]
    wrong_n = valid_n & (got_n != hash_tokens(tokens_n)[: len(got_n)])
    if not wrong_n.any():
        return
    row = int(np.argmax(wrong_n))
    raise TraceError(
        f"sample {trace.sample_ids[sample]}, row {row}, layers {trace.layer_ids[0]} to {trace.layer_ids[-1]}: it was "
        f"recorded for another token than the batch has there; {_shift_from(row, got_n, valid_n, tokens_n)}"
    )


def _shift_from(row: int, got_n: ndarray, valid_n: ndarray, tokens_n: ndarray) -> str:
    """Return whether the rows from here on belong to the next or the previous token, as a message.

    A recorder that lost a row hashed each token with its position in the sample, or among the kept rows: both are
    tried.
    """

    def fits(start: int, expected: ndarray) -> bool:
        shared = min(len(got_n) - start, len(expected))
        checked = valid_n[start : start + shared]
        return bool(checked.any()) and bool((got_n[start : start + shared] == expected[:shared])[checked].all())

    without_row = np.delete(tokens_n, row)
    if fits(row, hash_tokens(tokens_n)[row + 1 :]) or fits(row, hash_tokens(without_row)[row:]):
        return (
            "from here on the rows fit the next token: a row was dropped, so record the sample again, "
            "or the samples of a pack have other `lengths`: pass them"
        )
    with_row = np.insert(tokens_n, row, 0)
    if fits(row + 1, hash_tokens(tokens_n)[row:]) or fits(row + 1, hash_tokens(with_row)[row + 1 :]):
        return "from the next row on they fit the previous token: a row was inserted, so record the sample again"
    return "shifting the rows by one does not help: pass the batch whose tokens were recorded"


def _to_flat(tokens: Tensor | None, rows: int) -> Int[ndarray, " T"] | None:
    if tokens is None:
        return None
    if tokens.numel() != rows:
        raise TraceError(f"input_ids hold {tokens.numel()} tokens, the batch {rows} rows: pass the ids of this batch")
    return tokens.detach().reshape(-1).cpu().numpy()
