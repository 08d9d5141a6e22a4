"""Routes that an engine reports are checked before they are copied: a copy would cast and broadcast them."""

from dataclasses import replace

import numpy as np
import pytest

from relibra.errors import TraceError
from relibra.rl.run.step_trace import trace_of
from tests.rl.made_up import EXPERTS, LAYERS, response_of


def trace(*responses):
    return trace_of(responses, num_experts=EXPERTS, layer_ids=range(LAYERS), source="test")


def test_legal_routes_become_one_trace():
    responses = [response_of(0), response_of(1, length=1)]
    made = trace(*responses)
    made.validate()
    for response, start, stop in zip(responses, made.offsets, made.offsets[1:] - 1, strict=False):
        np.testing.assert_array_equal(made.experts_TLK[start:stop], response.experts_mLK)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: None,
        lambda routes: routes[:1],
        lambda routes: routes[:, :1],
        lambda routes: routes[..., :1],
        lambda routes: routes + 0.5,
        lambda routes: routes.astype(np.int64) + 256,
        lambda routes: routes.astype(np.int64) - 9,
        lambda routes: routes + np.uint8(EXPERTS),
    ],
)
@pytest.mark.parametrize("spoilt", [0, 1])
def test_illegal_routes_are_refused_by_sample(spoil, spoilt):
    responses = [response_of(5), response_of(6)]
    responses[spoilt] = replace(responses[spoilt], experts_mLK=spoil(responses[spoilt].experts_mLK))
    with pytest.raises(TraceError, match=r"sample [56]"):
        trace(*responses)
