from dataclasses import replace

import pytest

from relibra import ConfigError
from relibra.planning.costs.expert_shape import EXPERT_SHAPES, ExpertShape, expert_shape


def test_sizes_of_known_experts():
    shape = expert_shape("qwen3-30b-a3b")
    assert shape.parameters == 3 * 2048 * 768
    assert shape.weight_bytes == 9_437_184
    assert shape.gradient_bytes == 18_874_368
    assert shape.state_bytes == 14 * shape.parameters
    assert shape.flops_per_token_slot == 2 * shape.parameters
    assert shape.row_bytes == 4096
    adapted = replace(shape, adapter_rank=16)
    assert adapted.weight_bytes - shape.weight_bytes == adapted.returned_bytes("model") == 204_800
    assert adapted.gradient_bytes == adapted.returned_bytes("float32") == 409_600
    assert adapted.state_bytes == adapted.weight_bytes + 12 * 102_400
    assert EXPERT_SHAPES["deepseek-v3"].parameters == 44_040_192
    with pytest.raises(ConfigError, match=r"'gpt-5' is unknown: allowed are qwen3-30b-a3b, .* ExpertShape"):
        expert_shape("gpt-5")
    with pytest.raises(ConfigError, match="expert width is 0"):
        ExpertShape(hidden=1, width=0)
