from dataclasses import replace

import numpy as np
import pytest

from relibra import Budget, cluster_preset, plan_step
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand
from relibra.simulation import Execution, cut_model, memory_for_slots, memory_use, model_shape
from tests.planning.cases import make_demand
from tests.simulation.steps import random_step


def test_a_case_by_hand():
    plan, demand, cluster, model = random_step(0, nodes=1, per_node=2, layers=2, slots=0, experts_per_rank=1)
    model = replace(model, moe_layers=2, dense_layers=0, dense_width=0, shared_width=0)
    use = memory_use(plan, demand, cluster, model, Execution(shard_dense=False))
    shared = 2 * model.non_expert_parameters + 2 * 7 * 2  # both embeddings of 7 x 2
    own = shared / 2 + 2 * 30
    assert use.parts["weights"] == 2 * (shared + 2 * 30) + 4 * own
    assert use.parts["gradients"] == 4 * (shared + 2 * 30)
    assert use.parts["optimizer"] == 8 * own
    assert use.parts["slots"] == 0
    rows_MR = np.zeros((len(plan.replica_MLRB), 2))
    for s in np.flatnonzero(plan.micro_batch_S >= 0):
        rows_MR[plan.micro_batch_S[s], plan.rank_S[s]] += demand.counts_SLE[s, 0].sum()
    per_row = 2 * (4 * 2 + 2 * (2 + 1) * 2)
    per_slot = 2 * (2 * 2 + 3 * 5)
    expected = (2 * per_row * rows_MR + per_slot * plan.rank_load(demand).sum(axis=1)).max()
    assert use.parts["activations"] == pytest.approx(expected)
    assert use.parts["logits"] == 12 * 7 * rows_MR.max()
    assert use.total == sum(use.parts.values())
    assert use.warning == ""


def test_sharded_weights_are_whole_two_layers_at_a_time():
    plan, demand, cluster, model = random_step(0, nodes=1, per_node=2, layers=6, slots=0, experts_per_rank=1)
    model = replace(model, moe_layers=6, dense_layers=0, dense_width=0, shared_width=0, vocabulary=1)
    whole, spread = (
        memory_use(plan, demand, cluster, model, Execution(shard_dense=sharded)).parts for sharded in (False, True)
    )
    heads = 2 * 2  # embedding and output matrix of 2 x 1
    masters = 4 * (6 * (model.non_expert_parameters / 2 + 30) + heads / 2)
    assert whole["weights"] == 2 * (6 * (model.non_expert_parameters + 30) + heads) + masters
    assert spread["weights"] == 2 * (2 * (model.non_expert_parameters + 30) + heads) + masters
    assert {**spread, "weights": 0} == {**whole, "weights": 0}


def even_step(model, *, ranks=8, tokens, micro_batches=2, layers=None):
    """Make a step in which every rank feeds one sample of `tokens` per micro-batch, with even routes."""
    samples, layers = np.arange(ranks * micro_batches), np.arange(layers or model.moe_layers, dtype=np.int32)
    counts_SLE = np.full(
        (len(samples), len(layers), model.experts), tokens * model.top_k // model.experts, dtype=np.int32
    )
    demand = Demand(counts_SLE=counts_SLE, layer_ids=layers, sample_ids=samples, top_k=model.top_k)
    return demand.with_schedule(samples // ranks, samples % ranks, ranks, micro_batches)


@pytest.mark.parametrize(
    ("name", "tokens", "measured"),
    [
        ("qwen3-30b-a3b", 8192, 76.3),
        ("qwen3-30b-a3b", 2048, 64.3),
        ("gpt-oss-20b", 8192, 69.8),
        ("gpt-oss-20b", 4096, 56.3),
    ],
)
def test_the_estimate_is_near_dry_runs_of_the_trainer(name, tokens, measured):
    """Peaks in GiB of a rank of 8 with checkpointing, float32 masters and AdamW, without slots and full copies, when
    the trainer computed logits of all rows at once."""
    model, cluster = model_shape(name), cluster_preset("h100x8")
    demand = even_step(model, tokens=tokens)
    static = StepPlan.static(demand, cluster.topology)
    how = Execution(recompute_activations=True, whole_logits=True)
    use = memory_use(static, demand, cluster, model, how)
    assert use.total / 2**30 == pytest.approx(measured, rel=0.06)
    left = 0.9 * cluster.memory_bytes - use.total
    assert memory_for_slots(demand, cluster, model, how) == pytest.approx(max(0.0, left / 2**30))


def test_logits_in_chunks_leave_more_for_slots():
    model, cluster = model_shape("qwen3-30b-a3b"), cluster_preset("h100x8")
    demand = even_step(model, tokens=8192)
    whole, chunks = (
        memory_for_slots(demand, cluster, model, Execution(recompute_activations=True, whole_logits=at_once))
        for at_once in (True, False)
    )
    assert whole == 0.0
    assert chunks > 1.0
    quarter = even_step(model, tokens=8192, layers=12)
    part = cut_model(model, quarter)
    assert part.part_of == 4 * part.layers
    use = memory_use(StepPlan.static(quarter, cluster.topology), quarter, cluster, part, Execution())
    assert use.parts["logits"] == 3 * 2**28 / 4


def test_slots_get_what_the_fullest_stage_leaves():
    model, cluster = model_shape("qwen3-30b-a3b"), cluster_preset("h100x8", 16)
    demand = even_step(model, ranks=16, tokens=4096)
    whole = memory_for_slots(demand, cluster, model)
    assert memory_for_slots(demand, cluster, model, held_bytes=2.0**30) == pytest.approx(whole - 1)
    assert memory_for_slots(demand, cluster, model, held_bytes=2.0**40) == 0
    groups = replace(demand, group_M=np.array([0, 1], dtype=np.int32))
    assert memory_for_slots(groups, cluster, model) == whole
    part = even_step(model, ranks=16, tokens=4096, layers=12)
    assert memory_for_slots(part, cluster, model) == pytest.approx(whole / 4)
    staged = memory_for_slots(demand, cluster, model, Execution(pipeline_stages=2, recompute_activations=True))
    assert staged > 2 * whole, "half of the layers, with less than half of the weights"
    assert memory_for_slots(demand, cluster, model, Execution()) < whole, "activations are kept"


def test_balance_lowers_activations_and_slots_cost_little():
    demand = make_demand(64, 4, 32, 4, 8, 1, sigma=1.5, tokens=4000)
    cluster, model = cluster_preset("h100x8", 8), model_shape("qwen3-30b-a3b")
    model = replace(model, moe_layers=4, experts=32, top_k=4)
    plan = plan_step(demand, cluster, Budget(slots=2), expert=model.expert)
    use = memory_use(plan, plan.scheduled(demand), cluster, model)
    assert use.parts["activations"] < 0.9 * use.activations_static
    layers = 4 if plan.resident else 1
    assert plan.slots == 2
    assert use.parts["slots"] == 2 * layers * 6 * 3 * 2048 * 768


def test_stages_keep_activations_in_flight():
    plan, demand, cluster, model = random_step(3, nodes=1, per_node=2, layers=2, micro_batches=3)
    model = replace(model, dense_layers=0, dense_width=0)
    whole = memory_use(plan, demand, cluster, model)
    cut = memory_use(plan, demand, cluster, model, Execution(pipeline_stages=2))
    assert cut.parts["weights"] < whole.parts["weights"]
    drained = memory_use(plan, demand, cluster, model, Execution(pipeline_stages=2, mini_batches=3))
    assert drained.parts["activations"] < cut.parts["activations"], "one micro-batch is in flight, not two"
    again = memory_use(plan, demand, cluster, model, Execution(recompute_activations=True))
    assert again.parts["activations"] < whole.parts["activations"]
    forward = memory_use(plan, demand, cluster, model, Execution(forward_only=True))
    assert forward.parts["gradients"] == forward.parts["optimizer"] == 0
    assert forward.parts["activations"] <= again.parts["activations"]


def test_dense_layers_keep_what_expert_layers_keep():
    plan, demand, cluster, model = random_step(3, nodes=1, per_node=2, layers=2, micro_batches=3, slots=0)
    model = replace(model, dense_layers=0, dense_width=0, shared_width=0)
    dense = replace(model, dense_layers=40, dense_width=5)
    rows_MR = np.zeros((len(plan.replica_MLRB), 2))
    for s in np.flatnonzero(plan.micro_batch_S >= 0):
        rows_MR[plan.micro_batch_S[s], plan.rank_S[s]] += demand.counts_SLE[s, 0].sum()
    of_dense_MR = 2 * (4 * 2 + 2 * (2 + 1) * 2 + 3 * 5) * rows_MR

    def activations(of, **how):
        return memory_use(plan, demand, cluster, of, Execution(**how)).parts["activations"]

    again = activations(model, recompute_activations=True), activations(dense, recompute_activations=True)
    assert again[0] + 40 * 2 * 2 * rows_MR.max() <= again[1]  # 40 residuals of 2 bf16 values
    assert again[1] <= max(again[0], 2 * 2 * 2 * rows_MR.max() + of_dense_MR.max()) + 40 * 2 * 2 * rows_MR.max()
    forward = activations(dense, forward_only=True)
    assert forward == max(activations(model, forward_only=True), of_dense_MR.max())
    assert activations(dense) > activations(model) + 39 * of_dense_MR.mean()


def test_a_layout_without_replicas_needs_no_slots():
    demand = make_demand(16, 2, 8, 2, 4, 1)
    cluster = cluster_preset("h100x8", 4)
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=2, experts=8, top_k=2)
    for slots in (0, 4):
        plan = plan_step(demand, cluster, Budget(slots=slots), "static", expert=model.expert)
        assert memory_use(plan, plan.scheduled(demand), cluster, model).parts["slots"] == 0


def test_groups_share_the_optimizer_state_of_experts():
    plan, demand, cluster, model = random_step(3, nodes=1, per_node=2, layers=2, micro_batches=2)
    two = replace(demand, group_M=np.array([0, 1], np.int32))
    one, both = (memory_use(plan, each, cluster, model).parts["optimizer"] for each in (demand, two))
    assert both == pytest.approx(one / 2)


def test_what_does_not_fit_is_a_sentence_and_no_error():
    plan, demand, cluster, model = random_step(3)
    use = memory_use(plan, demand, replace(cluster, memory_bytes=10), model)
    assert "a rank of stage 0 would hold" in use.warning
    assert use.warning.endswith("use more ranks or pipeline stages, smaller micro-batches, or recompute activations")
    for share, fits in ((0.89, True), (0.91, False)):
        machine = replace(cluster, memory_bytes=int(use.total / share))
        assert (memory_use(plan, demand, machine, model).warning == "") == fits, "a tenth stays free"
    again = memory_use(plan, demand, replace(cluster, memory_bytes=10), model, Execution(recompute_activations=True))
    assert again.warning.endswith("smaller micro-batches")
