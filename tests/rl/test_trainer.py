"""Warnings before a run trains."""

from types import SimpleNamespace

from torch import nn

from relibra.rl.trainer import warn_beyond_context


def test_responses_beyond_the_context_of_a_model_are_warned_of(caplog):
    model = nn.Module()
    model.config = SimpleNamespace(max_position_embeddings=512)
    for longest, warned in ((513, True), (512, False)):
        caplog.clear()
        warn_beyond_context(longest, model, "mine")
        assert ("513 tokens" in caplog.text and "512" in caplog.text) == warned
