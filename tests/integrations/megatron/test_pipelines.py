"""Plans under pipeline parallelism: forward passes run ahead of backward passes, on two stages of two ranks."""

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/guides/trainers.md")

from tests.integrations.megatron.ranks_at_work import (
    LAYERS,
    RANKS,
    SAMPLES,
    TOKENS,
    VOCABULARY,
    build,
    gradients,
    make_plan,
    on_ranks,
)

pytestmark = pytest.mark.slow

STAGES, MICRO_BATCHES = 2, 4
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def expert_rank():
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_rank()


def routes():
    rng = np.random.default_rng(expert_rank())
    score = rng.random((MICRO_BATCHES, SAMPLES * TOKENS, LAYERS, 8)) + np.array([1, 0, 0, 0, 0, 0.6, 0, 0])
    return list(np.argsort(-score, axis=3)[..., :3])


def run_schedule(model, begin):
    """Run all micro-batches in Megatron's own schedule; return losses (of the last stage) and gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(numbers, model):
        number = next(numbers)
        begin(number)
        ids = torch.randint(
            VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(10 * number + expert_rank())
        )
        mask = torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5
        output = model(ids, torch.arange(TOKENS).expand(SAMPLES, TOKENS), mask, labels=ids.roll(-1, dims=1))
        return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(MICRO_BATCHES)),
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=TOKENS,
        micro_batch_size=SAMPLES,
        forward_only=False,
    )
    return [float(one["loss"]) for one in reduced], gradients(model)


def follows_a_plan_in_stages():
    from relibra.integrations.megatron.execution import execute_plan
    from relibra.integrations.megatron.route_replay import RouteReplay

    ids_MTLK, result = routes(), {}
    plan, demand = make_plan(ids_MTLK)
    stages = {"pipeline_model_parallel_size": STAGES, "pipeline_dtype": torch.float32}
    for name, settings in (("plain", {}), ("recompute", RECOMPUTE)):
        stock, model = (build(planned=planned, **stages, **settings) for planned in (False, True))
        with RouteReplay([stock]) as replay:
            losses, expected = run_schedule(stock, lambda m, replay=replay: replay.begin(ids_MTLK[m]))
            awaiting = replay.num_awaiting
        with execute_plan([model], plan, demand) as step:
            planned_losses, found = run_schedule(model, lambda m, step=step: step.begin(m, ids_MTLK[m]))
            awaiting += step.num_awaiting
        result[name] = {
            "losses": float(np.abs(np.subtract(losses, planned_losses)).max(initial=0)),
            "gradients": max(float((found[n] - expected[n]).abs().max()) for n in expected),
            "awaiting": awaiting,
            "replicas": plan.num_copies,
            "last stage": len(losses),
        }
    return result


def test_stages_follow_a_plan_while_forward_passes_run_ahead(tmp_path):
    found = on_ranks([follows_a_plan_in_stages], tmp_path, world=STAGES * RANKS, pipeline_model_parallel_size=STAGES)[
        "follows_a_plan_in_stages"
    ]
    assert sorted(of_rank["plain"]["last stage"] for of_rank in found) == [0, 0, MICRO_BATCHES, MICRO_BATCHES]
    for of_rank in found:
        for case in of_rank.values():
            assert case["losses"] < 1e-6
            assert case["gradients"] < 5e-7
            assert case["awaiting"] == 0
            assert case["replicas"] > 0
