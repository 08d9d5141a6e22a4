"""Parts of the integration of TRL that need no TRL: schedules, routes of engines, checks of hooks."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra import Demand, EngineError, TraceError
from relibra.integrations.trl.generation_batches import (
    mini_batches,
    read_engine_routes,
    record_routes,
    schedule_samples,
)
from relibra.integrations.trl.planned_grpo import PlannedGRPO, check_hooks
from relibra.replay import BatchRoutes
from tests.replay.tiny_models import random_tokens, tiny_model

LAYERS, EXPERTS = 2, 4


@given(micro_batches=st.integers(1, 6), iterations=st.integers(1, 3), accumulation=st.integers(1, 12))
def test_no_optimizer_step_falls_inside_a_mini_batch(micro_batches, iterations, accumulation):
    group_M = mini_batches(micro_batches, iterations, accumulation).tolist()
    passes = [
        (n % micro_batches, (n + 1) % accumulation == 0) for n in range(micro_batches * iterations * accumulation)
    ]
    stepped = {(one, other) for ((one, steps), (other, _)) in pairwise(passes) if steps and other == one + 1}
    assert group_M == sorted(group_M)
    assert set(group_M) == set(range(group_M[-1] + 1))
    assert all(group_M[one] < group_M[other] for one, other in stepped)


def counts(samples):
    """Token-slots that tell samples apart: sample s has s + 1 at expert s % E."""
    counts_SLE = np.zeros((samples, LAYERS, EXPERTS), dtype=np.int32)
    counts_SLE[np.arange(samples), :, np.arange(samples) % EXPERTS] = np.arange(1, samples + 1)[:, None]
    return counts_SLE


def test_samples_run_where_trl_puts_them():
    group_M = np.array([0, 1], dtype=np.int32)
    demand = schedule_samples(
        counts(16), layer_ids=range(LAYERS), top_k=2, world_size=4, num_ranks=2, mini_batch_M=group_M
    )
    assert demand.tokens_MLRE.shape == (4, LAYERS, 2, EXPERTS)
    assert demand.rank_S.tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert demand.micro_batch_S.tolist() == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2
    assert demand.group_M.tolist() == [0, 1, 2, 3]  # each expert-parallel group of ranks has its own mini-batches
    assert demand.tokens_MLRE[:, 0].sum(axis=2).tolist() == [[3, 11], [7, 15], [19, 27], [23, 31]]
    with pytest.raises(EngineError, match="15 samples, which do not fill 2 micro-batches of 4 ranks evenly"):
        schedule_samples(counts(15), layer_ids=range(LAYERS), top_k=2, world_size=4, num_ranks=2, mini_batch_M=group_M)


@pytest.fixture
def batch():
    """A padded batch as TRL makes it: prompts padded left, completions right."""
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :2] = mask[1, 6:] = mask[2, :1] = mask[2, 8:] = 0
    return random_tokens(3, 9, seed=1) * mask, mask


def test_recorded_routes_are_those_of_the_batch_in_any_order(batch):
    tokens, mask = batch
    model = tiny_model().train()
    trace = record_routes(model, tokens, mask, rows_at_once=2)
    assert model.training
    assert trace.rows_per_sample.tolist() == mask.sum(1).tolist()
    order = [2, 0]
    routes = BatchRoutes.padded(trace.select(order), mask[order], tokens[order])
    assert routes.valid_T.tolist() == (mask[order].flatten() != 0).tolist()
    with pytest.raises(TraceError, match="recorded for another token"):
        BatchRoutes.padded(trace.select([2, 1]), mask[[2, 2]], tokens[[2, 2]])


def test_routes_of_an_engine_may_lack_last_tokens(batch):
    tokens, mask = batch
    model = tiny_model()
    trace = record_routes(model, tokens, mask, rows_at_once=3)
    whole = [trace.experts_TLK[trace.sample_rows(s)] for s in range(3)]
    lengths = mask.sum(1).tolist()
    asked = []

    def engine(tokens_S):
        asked.append(tokens_S)
        return [rows[:-1] for rows in whole]

    found = read_engine_routes(engine, model, tokens, mask, cut=False)
    assert asked == [[row[own != 0].tolist() for row, own in zip(tokens, mask, strict=True)]]
    assert found.rows_per_sample.tolist() == [n - 1 for n in lengths]
    assert Demand.from_trace(found).counts_SLE.sum(axis=2).tolist() == [[2 * (n - 1)] * 3 for n in lengths]
    BatchRoutes.padded(found.select([1, 2, 0]), mask[[1, 2, 0]], tokens[[1, 2, 0]])

    def refused(arrays, cut=False):
        with pytest.raises(TraceError) as raised:
            read_engine_routes(lambda _: arrays, model, tokens, mask, cut=cut)
        return str(raised.value)

    assert "2 samples for 3" in refused(whole[:2])
    assert f"for sample 1 of {lengths[1]} tokens" in refused([whole[0], whole[1][:-2], whole[2]])
    assert f"for sample 0 of {lengths[0]} tokens" in refused([np.concatenate([whole[0]] * 2), *whole[1:]])
    longer = [np.concatenate([rows, rows[:1]]) for rows in whole]
    cut = read_engine_routes(lambda _: longer, model, tokens, mask, cut=True)
    assert cut.rows_per_sample.tolist() == lengths
    assert "range 0..7" in refused([rows.astype(np.int64) + 8 for rows in whole])


class Trainer:
    """Hooks of TRL 1.16 by name and parameters."""

    def training_step(self, model, inputs, num_items_in_batch): ...
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): ...
    def save_model(self, output_dir=None, _internal_call=False): ...
    def _save_checkpoint(self, model, trial): ...
    def _prepare_inputs(self, generation_batch): ...
    def _generate_and_score_completions(self, inputs): ...
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False
    ): ...


def test_another_trl_is_refused_with_the_hook_that_differs(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9.9")
    check_hooks(type("Planned", (PlannedGRPO, Trainer), {}))

    class Changed(Trainer):
        def compute_loss(self, inputs, model): ...

    with pytest.raises(EngineError, match=r"TRL 9\.9\.9: compute_loss takes \('inputs', 'model'\)"):
        check_hooks(type("Planned", (PlannedGRPO, Changed), {}))
    with pytest.raises(EngineError, match=r"Alone has no training_step behind PlannedGRPO, in TRL 9\.9\.9"):
        check_hooks(type("Alone", (PlannedGRPO,), {}))


def test_a_missing_trl_is_one_sentence():
    program = (
        "import sys; sys.modules['trl'] = None\n"
        "try: from relibra.integrations.trl import PlannedGRPOTrainer\n"
        "except ModuleNotFoundError as error: print(error.name, str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "needs the package 'trl', which is not installed" in done.stdout
    assert done.stdout.strip().endswith("pip install -e '.[train,trl]'")
