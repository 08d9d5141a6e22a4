"""Sampled answers are those of the embedded engine: the same tokens, log-probs and routes for one seed."""

import numpy as np
import pytest

from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import new_response
from relibra.serving.layout import WorkerLayout
from tests.serving.in_process import served_in_process
from tests.serving.models import answer_of, write_model

SEED, TEMPERATURE, LIMIT = 5, 0.7, 24
STOPS = (11, 12, 13)
PROMPTS = [tuple((7 * s + 3 * n) % 57 + 3 for n in range(3 + 4 * s)) for s in range(5)]


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_sampled_answers_equal_the_embedded_engine(name, tmp_path):
    model = write_model(name, tmp_path)
    engine = EmbeddedEngine(model=model, pad_id=0, stop_ids=STOPS, temperature=TEMPERATURE, seed=SEED, max_batch=8)
    responses = [new_response(s, s, prompt) for s, prompt in enumerate(PROMPTS)]
    windows, _ = engine.generate(responses, window=LIMIT, max_response=LIMIT)
    requests = [
        Sequence(
            number=s,
            prompt=prompt,
            sampling=SamplingParameters(
                limit=LIMIT, temperature=TEMPERATURE, seed=SEED, sample=s, stop_ids=STOPS, routes=True
            ),
        )
        for s, prompt in enumerate(PROMPTS)
    ]
    layout = WorkerLayout(experts=2, micro_batches=2, max_tokens=32, max_length=64, kv_tokens=1024, timeout=20.0)
    with served_in_process(tmp_path, layout) as served:
        answers = list(map(answer_of, served.generate(requests)))
    assert any(window.stopped for window in windows)
    for window, answer in zip(windows, answers, strict=True):
        assert answer.tokens == window.tokens_w.tolist()
        assert np.abs(answer.log_probs - window.log_probs_w).max() <= 1e-5
        assert (answer.routes == window.experts_mLK).all()
