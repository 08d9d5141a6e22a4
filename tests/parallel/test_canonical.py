"""Canonical sums: one digest under all plans, tokens sent once, experts run forward once."""

import hashlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from relibra.parallel import canonical, relocate
from relibra.parallel.balanced import BalancedEP
from relibra.planning.traffic.rank_tables import rank_tables
from tests.parallel.ranks_at_work import load, on_ranks, step_of_model, step_on_rank
from tests.parallel.steps import E, on_nodes, staying_replicas, step
from tests.parallel.trainings import noted_timelines, plans_of

CHUNK = 16
"""Of these tests: small samples have several."""
NUM_PLANS = 200
LOGICAL_LE = np.tile(np.arange(E, dtype=np.int16), (3, 1))


def long_step(num_ranks, **settings):
    schedule = ([0] * 4 + [1] * 4, [s % num_ranks for s in range(4)] * 2)
    return step(num_ranks, lengths=range(21, 37, 2), schedule=schedule, slots=2, **settings)


def random_plans(case, count):
    """Draw homes, replicas, quotas and dispatch."""
    plans, num_ranks = [], case.plan.num_ranks
    for seed in range(count):
        rng = np.random.default_rng(seed)
        drawn = on_nodes(case, 1 + seed % 2, ["flat", "hierarchical"][seed // 2 % 2]).plan
        drawn = replace(drawn, physical_to_logical_map=rng.permuted(LOGICAL_LE, axis=1))
        replicas = staying_replicas(rng, case.demand.load_MLE, drawn.home_LE, num_ranks, 2)
        names = ("replica_MLRB", "quota_MLRB")
        bound_ML = np.zeros_like(drawn.bound_ML)
        plans.append(replace(drawn, **dict(zip(names, replicas, strict=True)), bound_ML=bound_ML))
    return plans


def digest_on_rank(case, folder):
    """Return the digest of this rank's outputs, loss and gradients in logical order under each plan."""
    model, found = load(case, folder), []
    with mock.patch.object(canonical, "CHUNK", CHUNK):
        for plan in case.plans:
            relocate(model, plan.physical_to_logical_map)
            model.zero_grad()
            done = step_of_model(model, replace(case, plan=plan))
            relocate(model, LOGICAL_LE)
            gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
            parts = [*done["logits"].values(), torch.tensor(done["loss"]), *gradients]
            found.append(hashlib.sha256(b"".join(part.float().numpy().tobytes() for part in parts)).hexdigest())
    return {"digests": found}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_hundred_random_plans_have_one_digest(tmp_path, num_ranks):
    case = long_step(num_ranks, family="gpt_oss", unrouted_last=True, sums="canonical")
    plans = random_plans(case, NUM_PLANS)
    of_layers = [(0, m, layer, CHUNK) for m, layer in np.ndindex(2, 3)]
    pushes = [[push for at in of_layers for push in rank_tables(plan, case.demand, *at).pushes] for plan in plans]
    assert np.mean([any(push.tokens > CHUNK for push in of_plan) for of_plan in pushes]) > 0.5
    case = replace(case, plan=plans[0], plans=plans_of(*(replace(case, plan=plan) for plan in plans)))
    for result in on_ranks(num_ranks, {"plans": case}, tmp_path, digest_on_rank)["plans"]:
        assert len(result["digests"]) == NUM_PLANS
        assert len(set(result["digests"])) == 1


def counted_step(case, folder):
    """Do a step; return how often experts ran, and the bytes of rows by stage."""
    with (
        mock.patch.object(canonical, "CHUNK", CHUNK),
        mock.patch.object(BalancedEP, "run_rows", autospec=True, side_effect=BalancedEP.run_rows) as run_rows,
        noted_timelines() as timelines,
    ):
        step_on_rank(case, folder)
    rows = [event for event in timelines[0].events if event.label == "rows"]
    sent = {stage: sum(event.bytes for event in rows if event.stage == stage) for stage in ("dispatch", "combine")}
    return {"runs": run_rows.call_count, **sent}


WIDE_GATES = {"family": "deepseek_v3", "dtype": "bfloat16", "layer_ids": (1, 2), "top_k": 3}
"""Gate weights are float32 beside bfloat16 rows."""


@pytest.mark.parametrize("settings", [{}, WIDE_GATES], ids=["float32", "bfloat16"])
def test_tokens_are_sent_once_and_experts_run_once(tmp_path, settings):
    fast = long_step(2, replicas=[], **settings)  # quotas of replicas would differ
    cases = {"fast": fast, "canonical": replace(fast, sums="canonical")}
    found = on_ranks(2, cases, tmp_path, counted_step)
    num_layers = fast.demand.load_MLE.shape[1]
    for rank, (of_fast, of_canonical) in enumerate(zip(*found.values(), strict=True)):
        tables = [rank_tables(fast.plan, fast.demand, rank, m, layer, CHUNK) for m, layer in np.ndindex(2, num_layers)]
        rows_XP = np.stack([one.receive_RP.sum(axis=0) for one in tables])
        assert of_canonical["runs"] == (-(-rows_XP // CHUNK)).sum()
        assert of_canonical["dispatch"] == of_fast["dispatch"] > 0
        assert of_canonical["combine"] > of_fast["combine"]


def rows_alive_on_rank(case, folder):
    """Do a step; return the most tensors of chunks, rows and results, that are alive when a chunk begins."""
    held, most, run_rows = [], 0, BalancedEP.run_rows

    def noted(self, rows_XH, *others):
        nonlocal most
        most = max(most, sum(not one.expired() for one in held))
        output_XH = run_rows(self, rows_XH, *others)
        held.extend(StorageWeakRef(one.untyped_storage()) for one in (rows_XH, output_XH))
        return output_XH

    with mock.patch.object(canonical, "CHUNK", CHUNK), mock.patch.object(BalancedEP, "run_rows", noted):
        step_on_rank(case, folder)
    return {"most": most}


def test_checkpointing_drops_the_chunks_of_other_layers(tmp_path):
    case = long_step(2, sums="canonical", checkpointing=True)
    cases = {"checkpointed": case, "kept": replace(case, checkpointing=False)}
    found = on_ranks(2, cases, tmp_path, rows_alive_on_rank)
    for rank, (checkpointed, kept) in enumerate(zip(*found.values(), strict=True)):
        tables = [rank_tables(case.plan, case.demand, rank, m, layer, CHUNK) for m, layer in np.ndindex(2, 3)]
        of_layer = [2 * (-(-one.receive_RP.sum(axis=0) // CHUNK)).sum() for one in tables]
        assert checkpointed["most"] <= max(of_layer) < kept["most"]
