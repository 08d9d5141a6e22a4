"""`RoutedSample`: routes of one sample as another program recorded them; `ImportRules`: what recordings do not say."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jaxtyping import Bool, Integer
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_TOP_K, check_model_size
from relibra.routing.import_choices import ShortRows, ZeroRows
from relibra.routing.trace import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class ImportRules:
    """What recordings of other programs do not say.

    num_experts      logical experts per layer
    layers           decoder layers with experts; None: every recorded layer has experts, and they count from 0
    zero_rows        what is done with rows that are zero in every layer
    short_rows       which tokens lack a row where a sample has fewer than expected
    top_k            choices per token, of formats without shapes
    recorded_layers  length of the layer axis, of formats without shapes
    """

    num_experts: int
    layers: tuple[int, ...] | None = None
    zero_rows: ZeroRows = ZeroRows.REFUSE
    short_rows: ShortRows = ShortRows.REFUSE
    top_k: int | None = None
    recorded_layers: int | None = None

    def __post_init__(self) -> None:
        """Check ranges and the order of layers."""
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise TraceError(f"num_experts is {self.num_experts}: allowed are 1 to {MAX_EXPERTS}")
        if self.top_k is not None and not 1 <= self.top_k <= min(MAX_TOP_K, self.num_experts):
            raise TraceError(f"top_k is {self.top_k}: allowed are 1 to {min(MAX_TOP_K, self.num_experts)}")
        layers = self.layers or ()
        if self.layers is not None and (not layers or layers[0] < 0 or any(a >= b for a, b in pairwise(layers))):
            raise TraceError(f"layers are {list(layers)}: expected ascending decoder layers")
        check_model_size("the model", max(len(layers), self.recorded_layers or 0), self.num_experts)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedSample:
    """Routes of one sample.

    where          file and place, begins messages
    ids_TLK        recorded rows, of any integer type; -1 throughout a row: not recorded
    tokens         tokens of the sample, prompt and response; None: as many as rows
    start          token of the first row
    absent_T       rows that hold a filler in place of a route; None: none known
    last_absent    whether the row of the last token, if there is one, is a filler: that token was never processed
    prompt_tokens  tokens of the prompt; 0: not known
    sample_id      number of the sample; None: its place in the trace
    group          name of the prompt that it answers; None: not known
    version        policy version that routed it
    """

    where: str
    ids_TLK: Integer[ndarray, "T L K"]
    tokens: int | None = None
    start: int = 0
    absent_T: Bool[ndarray, " T"] | None = None
    last_absent: bool = False
    prompt_tokens: int = 0
    sample_id: int | None = None
    group: str | None = None
    version: int = 0
