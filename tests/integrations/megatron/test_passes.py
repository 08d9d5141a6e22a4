"""A layer's micro-batch in forward passes, checkpoints and recomputations."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from relibra.errors import EngineError
from relibra.integrations.megatron.route_replay import LayerPasses


def run(passes, seen, reentrant=True):
    def layer(x):
        seen.append(passes.take("layer 0"))
        return 2 * x

    x = torch.ones(2, requires_grad=True)
    return checkpoint(layer, x, use_reentrant=True) if reentrant else layer(x)


def test_recomputations_see_the_micro_batch_of_their_pass():
    passes, seen = LayerPasses(), []
    passes.begin("first")
    one = run(passes, seen)
    passes.begin("second")
    other = run(passes, seen)
    assert passes.num_awaiting == 2
    one.sum().backward()
    other.sum().backward()
    assert seen == ["first", "second", "first", "second"]
    assert passes.num_awaiting == 0


def test_nothing_waits_without_a_recomputation():
    passes, seen = LayerPasses(), []
    passes.begin("trained")
    run(passes, seen, reentrant=False).sum().backward()
    with torch.no_grad():
        passes.begin("scored")
        run(passes, seen, reentrant=False)
    assert seen == ["trained", "scored"]
    assert passes.num_awaiting == 0


def test_a_recomputation_of_a_forgotten_pass_is_refused():
    passes, seen = LayerPasses(), []
    passes.begin("first")
    output = run(passes, seen)
    passes.clear()
    with pytest.raises(EngineError, match="layer 0 is recomputed more often than it ran forward"):
        output.sum().backward()
