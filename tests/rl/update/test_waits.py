"""Where the host waits for the device in recompute, updates and values: once per pass, and twice per optimizer step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from relibra.parallel import execute_plan
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.batch.schedule import Schedule
from relibra.rl.batch.token_batch import make_token_batch, with_routes
from relibra.rl.batch.training_batch import BatchExecution, TrainingBatch
from relibra.rl.config.run_config import load_config
from relibra.rl.model.optimizer import StepCount, make_optimizer
from relibra.rl.model.packed_sequences import use_packed_attention
from relibra.rl.model.token_scores import learn_logits
from relibra.rl.update.credit import compute_values
from relibra.rl.update.policy_update import update_policy
from relibra.rl.update.recompute import recompute
from relibra.rl.update.value_update import update_values
from tests.gpu.steps_in_threads import on_threads
from tests.parallel.steps import TWO_MICRO_BATCHES, of_experts, step
from tests.rl.made_up import EXPERTS, LAYERS, response_of, responses_of
from tests.rl.update.device_waits import DeviceWaits, follow_copies

TERMS = ("algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.01")
CONFIGS = {
    name: load_config(None, [f"algorithm.preset={name}", *TERMS, "update.mini_batches=2"]) for name in ("tppo", "gspo")
}
RESPONSES = [
    response_of(0, length=4),
    response_of(1, prompt=2, earlier=3, length=4, finished=False),
    response_of(2, earlier=2, length=6),
    response_of(3, prompt=1, earlier=1, length=3, reward=0.0),
]


@pytest.fixture(autouse=True)
def _copies_are_followed(monkeypatch):
    follow_copies(monkeypatch)


def batch_of_rank(rank):
    """Return the responses of a rank, one in each of two mini-batches, with their routes."""
    micro_batch_S, rank_S = np.array(TWO_MICRO_BATCHES, dtype=np.int32)
    micro_batches = []
    for m in range(2):
        chosen = np.flatnonzero((micro_batch_S == m) & (rank_S == rank)).tolist()
        experts = [RESPONSES[s].experts_mLK for s in chosen]
        made = make_token_batch(RESPONSES, chosen)
        micro_batches.append(with_routes(made, experts, RESPONSES, num_experts=EXPERTS, layer_ids=range(LAYERS)))
    schedule = Schedule(mini_batch_M=np.arange(2, dtype=np.int32), micro_batch_S=micro_batch_S, rank_S=rank_S)
    return TrainingBatch(responses=RESPONSES, micro_batches=micro_batches, schedule=schedule, demand=None, plan=None)


def with_targets(batch, log_probs):
    windows = [micro_batch.in_window_X for micro_batch in batch.micro_batches]
    return batch.filled(
        old_log_probs_X=log_probs,
        advantages_X=[window_X.float() for window_X in windows],
        loss_mask_X=[window_X & (window_X.cumsum(0) > 1) for window_X in windows],
        ref_log_probs_X=[micro_batch.sampled_log_probs_X for micro_batch in batch.micro_batches],
        positive_B=[torch.tensor([RESPONSES[s].reward == 1.0 for s in one.samples_B]) for one in batch.micro_batches],
    )


def waits_of_a_step(model, case, name, loss):
    """Return the waits of the second planned step: in the first one rules of routers are checked."""
    use_packed_attention(model)
    learn_logits(model)
    batch, optimizer, config = batch_of_rank(dist.get_rank()), make_optimizer(model, 1e-3), CONFIGS[name]
    routes = dict(enumerate(micro_batch.routes for micro_batch in batch.micro_batches))
    for _ in range(2):
        with execute_plan(model, case.plan, case.demand, routes=routes) as execution:
            context = BatchExecution(model=model, batch=batch, execution=execution)
            with DeviceWaits(model) as recomputing:
                recomputed = recompute(model, batch, context, config.algorithm, temperature=0.7)
            trained = with_targets(batch, recomputed.log_probs)
            with DeviceWaits(model) as updating:
                update = update_policy(
                    model, optimizer, trained, context, loss, config.update, count=StepCount(), num_ranks=2
                )
    assert update.count.made == 2
    assert not execution.ran_at_home
    return recomputing.found, updating.found


def waits_on_threads(name, loss):
    trace = of_experts([one.experts_mLK for one in RESPONSES])
    case = step(trace=trace, slots=2, dtype="bfloat16", checkpointing=True)
    [one, other] = on_threads(case, lambda model, case: waits_of_a_step(model, case, name, loss))
    assert one == other
    return one


def test_the_policy_waits_once_a_pass_and_twice_a_step():
    recomputing, updating = waits_on_threads("tppo", find_loss(CONFIGS["tppo"]))
    assert recomputing == {"wait_for_copies": 1}
    assert updating == {"read_numbers": 2, "clip_gradients": 2}


def test_a_wait_more_is_found():
    loss = find_loss(CONFIGS["gspo"])

    def reading(inputs):
        assert inputs.mask_X.sum().item() >= 0
        return loss.function(inputs)

    _, updating = waits_on_threads("gspo", replace(loss, function=reading))
    assert updating == {"read_numbers": 2, "clip_gradients": 2, "__call__": 2}


class Counting(nn.Module):
    """A value model that says a number for each token."""

    def __init__(self):
        super().__init__()
        self.worth = nn.Embedding(64, 1)

    def forward(self, input_ids, position_ids, use_cache):
        assert not use_cache
        self.logits = self.worth(input_ids) + 0 * position_ids[..., None]
        return self


@pytest.mark.usefixtures("group")
def test_the_value_model_waits_once_a_pass_and_twice_a_step():
    config, critic, responses = CONFIGS["tppo"], Counting(), responses_of([4, 1, 6, 3], routed=False)
    with DeviceWaits(critic) as waits:
        compute_values(critic, responses, 8)
    assert waits.found == {"wait_for_copies": 1}
    optimizer = make_optimizer(critic, 1e-3)
    settings = {"by_group": False, "seed": 0, "responses_per_step": 4, "count": StepCount(), "num_ranks": 1}
    for _ in range(2):  # the first one makes the states of the optimizer
        with DeviceWaits(critic) as waits:
            _, count, _ = update_values(critic, optimizer, responses, config.critic, config.update, **settings)
    assert waits.found == {"update_values": count.made, "clip_gradients": count.made}
