"""What a run says before it trains."""

from types import SimpleNamespace

from torch import nn

from relibra.rl.trainer import _warn_beyond_context
from tests.rl.joined import alone


def test_responses_beyond_the_context_of_a_model_are_warned_of(caplog):
    model = nn.Module()
    model.config = SimpleNamespace(max_position_embeddings=512)
    with alone():
        for longest, name, told in ((513, "mine", True), (512, "mine", False), (513, None, False)):
            caplog.clear()
            _warn_beyond_context(longest, model, name)
            assert ("made for 512 (max_position_embeddings)" in caplog.text) == told
