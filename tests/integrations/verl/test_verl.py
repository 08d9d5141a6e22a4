"""verl's micro-batches: its invariants hold, loads get even, and where routes lack, nothing changes.

Quick: stand-ins have the names and arguments of verl's functions. test_verl_package.py runs verl's own.
"""

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relibra.errors import EngineError
from relibra.integrations import verl
from relibra.integrations.expert_layout import ExpertLayout
from tests.integrations.routed_samples import draw_samples
from tests.integrations.verl.stand_in import dealt, make_batch, stand_in

LAYOUT = ExpertLayout(num_experts=16, expert_ranks=4, group_ranks=4, token_price=0.0, pair_price=0.0)


def tables_of(ranks, samples, *, unit=1, micro_batches=4, layers=3):
    tables, cases = [], []
    for rank in range(ranks):
        lengths, routes = draw_samples(rank, samples, layers=layers)
        indices = dealt(samples, micro_batches)
        tables.append(verl.own_table(routes, np.array(lengths), indices, LAYOUT, unit=unit))
        cases.append((lengths, indices))
    return tables, cases


@pytest.mark.parametrize("unit", [1, 4])
def test_samples_stay_on_their_rank_and_groups_whole(unit):
    tables, cases = tables_of(4, 32, unit=unit)
    step = verl.repack_tables(tables, LAYOUT, rank_tokens=1000, since=time.perf_counter())
    schedule = step.schedule
    assert np.array_equal(schedule.rank_S, np.repeat(np.arange(4), 32 // unit))
    assert schedule.sum_per_rank(np.ones_like(schedule.rank_S, dtype=np.int64)).min() >= 1
    lengths = np.concatenate([np.add.reduceat(one, np.arange(0, 32, unit)) for one, _ in cases])
    assert schedule.sum_per_rank(lengths).max() <= 1000
    assert step.skew[1] < step.skew[0] - 0.02


@pytest.fixture
def engine(monkeypatch):
    """Return verl's Megatron engine, installed into a stand-in of verl."""
    engine, modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return engine


@pytest.mark.parametrize("together", [1, 4])
def test_micro_batches_are_cut_by_recorded_routes(engine, caplog, monkeypatch, together):
    monkeypatch.setattr(ExpertLayout, "of_megatron", staticmethod(lambda *_, **__: one_rank()))
    lengths, routes = draw_samples(5, 32)
    data = make_batch(lengths, routes, force_group_size=together)
    _, stock = engine.cut(data)
    verl.install()
    verl.install()
    caplog.clear()
    micro_batches, indices = engine.cut(data)
    assert indices != stock
    assert sorted(s for one in indices for s in one) == list(range(32))
    assert len(indices) == len(stock)
    assert all(np.array_equal(np.unique(np.array(one) // together) * together, one[::together]) for one in indices)
    for batch, samples in zip(micro_batches, indices, strict=True):
        assert [int(row[0]) for row in batch["input_ids"].unbind()] == samples
        assert sum(lengths[s] for s in samples) <= 1000
        for row, s in zip(batch["routed_experts"].unbind(), samples, strict=True):
            assert np.array_equal(row.numpy(), routes[s])
    [line] = [record.getMessage() for record in caplog.records]
    before, after = (float(part) for part in line.split("rank skew ")[1].split(" (")[0].split(" -> "))
    assert after < before
    _, again = engine.cut(data, forward_only=True)
    assert again == indices
    assert "log-probs" in caplog.text


def one_rank():
    """Four expert-parallel ranks that one data-parallel rank feeds: tensor parallelism."""
    return ExpertLayout(num_experts=16, expert_ranks=4, group_ranks=1, token_price=0.0, pair_price=0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dynamic_bsz": False}, "use_dynamic_bsz"),
        ({"routes": None}, "routed_experts"),
        ({"short": True}, "rows for"),
        ({"enable_routing_replay": False}, ""),
    ],
)
def test_micro_batches_stay_where_routes_do_not_fit(engine, caplog, monkeypatch, settings, words):
    monkeypatch.setattr(ExpertLayout, "of_megatron", staticmethod(lambda *_, **__: one_rank()))
    lengths, routes = draw_samples(6, 32)
    routes = None if "routes" in settings else [one[:2] for one in routes] if "short" in settings else routes
    data = make_batch(lengths, routes, **{k: v for k, v in settings.items() if k not in ("routes", "short")})
    _, stock = engine.cut(data)
    verl.install()
    caplog.clear()
    assert engine.cut(data)[1] == stock
    assert words in caplog.text


def test_engines_without_replay_say_how_to_switch_it_on(engine, caplog):
    data = make_batch(*draw_samples(6, 32))
    engine.enable_routing_replay = False
    verl.install()
    engine.cut(data, forward_only=True)
    assert "R3" not in caplog.text
    engine.cut(data)
    engine.cut(data)
    assert caplog.text.count("router_replay.mode=R3") == 1


def test_a_critic_is_left_alone_and_gets_no_advice_for_actors(engine, caplog):
    data = make_batch(*draw_samples(6, 32), use_dynamic_bsz=False)
    engine.is_value_model = True
    verl.install()
    caplog.clear()
    for replays in (False, True):
        engine.enable_routing_replay = replays
        assert engine.cut(data)[0]
    assert not caplog.records


def test_a_schedule_that_verl_makes_elsewhere_is_said_once(engine, caplog):
    data = make_batch(*draw_samples(6, 32))
    engine.engine_config = SimpleNamespace(**vars(engine.engine_config), dynamic_context_parallel=True)
    verl.install()
    caplog.clear()
    engine.cut(data)
    engine.cut(data)
    assert caplog.text.count("dynamic context parallelism") == 1


def with_log_probs(lengths, routes, *, prompt=3, sd=0.005, broken=None, seed=0):
    """Return a batch with log-probs of a pass and of a rollout; `broken`: (layer, expert) whose tokens differ more."""
    rng, rows = np.random.default_rng(seed), []
    for length, routes_TLK in zip(lengths, routes, strict=True):
        noise = rng.normal(0, sd, length - prompt)
        if broken is not None:
            layer, expert = broken
            uses = (routes_TLK[prompt - 1 : length - 1, layer] == expert).any(axis=-1)
            noise += np.where(uses, rng.normal(0, 0.1, length - prompt), 0.0)
        rows.append(torch.from_numpy(noise.astype(np.float32)))

    def nested(tensors):
        return torch.nested.nested_tensor(list(tensors), layout=torch.jagged)

    batch = make_batch(lengths, routes)
    batch["old_log_probs"] = nested(rows)
    batch["rollout_log_probs"] = nested(torch.zeros_like(one) for one in rows)
    batch["response_mask"] = nested(torch.ones(len(one), dtype=torch.int64) for one in rows)
    batch["responses"] = nested(torch.zeros(len(one), dtype=torch.int64) for one in rows)
    return batch


def test_log_probs_of_the_rollout_are_checked(engine, caplog):
    lengths, routes = draw_samples(5, 64)
    expert = int(np.bincount(np.concatenate([one[:, 1].ravel() for one in routes])).argmin())
    for seed in range(4):
        verl.watch_sampler(with_log_probs(lengths, routes, seed=seed), None, engine)
    assert not caplog.records
    tokens = verl.sampled_tokens(with_log_probs(lengths, routes), num_experts=16)
    assert len(tokens.log_ratio_X) == sum(lengths) - 3 * len(lengths)
    assert np.array_equal(tokens.experts_XLK[: lengths[0] - 3], routes[0][2 : lengths[0] - 1])
    verl.watch_sampler(with_log_probs(lengths, routes, broken=(1, expert), seed=9), None, engine)
    assert f"layer 1, expert {expert}" in caplog.text
    caplog.clear()
    verl.watch_sampler(make_batch(lengths, routes), None, engine)
    assert not caplog.records


def test_other_versions_of_verl_are_refused(engine):
    type(engine).forward_backward_batch = lambda *batch: batch
    with pytest.raises(EngineError, match="relibra was written for"):
        verl.install()
