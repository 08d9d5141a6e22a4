"""The schedule of slime, miles and vime: invariants of upstream hold, loads get even; without routes nothing changes.

They are not installed: packages with functions of the same names and arguments stand in for them. What the
real functions did is in docs/guides/trainers.md.
"""

import logging
import sys
import weakref
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from relibra.errors import EngineError
from relibra.integrations import slime
from relibra.parallel_map import available_cores
from tests.integrations.routed_samples import draw_samples

SCHEDULE = '''
def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    """Deal samples in order: micro-batches of two samples, dealt to ranks in turn."""
    ranks = train_parallel_config["dp_size"]
    rollouts = list(dict.fromkeys(rollout_indices))
    steps = len(rollouts) // global_batch_size
    partitions, places, numbers = [[] for _ in range(ranks)], [[] for _ in range(ranks)], []
    for step in range(steps):
        kept = set(rollouts[step * global_batch_size : (step + 1) * global_batch_size])
        samples = [s for s, rollout in enumerate(rollout_indices) if rollout in kept]
        numbers.append(len(samples) // 2 // ranks)
        for k in range(numbers[-1] * ranks):
            own = partitions[k % ranks]
            places[k % ranks].append([len(own), len(own) + 1])
            own += samples[2 * k : 2 * k + 2]
    return partitions, places, numbers, [global_batch_size] * steps
'''
ROUTES = """
def validate_rollout_routed_experts_for_replay(routed_experts, args):
    assert routed_experts
"""
CONVERSION = """
from miles.utils.dp_schedule import build_dp_schedule

def split_train_data_by_dp_scheduled_raw(args, data, *, train_parallel_config):
    lengths = [len(tokens) for tokens in data["tokens"]]
    options = {"global_batch_size": args.global_batch_size, "rollout_indices": data["rollout_ids"]}
    return build_dp_schedule(args, train_parallel_config, lengths, **options)
"""
BUILDER = """
from vime.utils.dp_schedule import build_dp_schedule

class BatchBuilder:
    def __init__(self, args):
        self.args, self.train_parallel_config = args, None

    def split_by_dp(self, data):
        lengths = [len(tokens) for tokens in data["tokens"]]
        options = {"global_batch_size": self.args.global_batch_size, "rollout_indices": data["rollout_ids"]}
        return build_dp_schedule(self.args, self.train_parallel_config, lengths, **options)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that writes a package and makes it the only one of these trainers."""

    def write(files):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            for folder in file.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
            file.write_text(text)

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("slime", "miles", "vime"):
            del sys.modules[name]


def arguments(**others):
    sizes = {"hidden_size": 64, "moe_ffn_hidden_size": 64, "num_layers": 3, "num_attention_heads": 2, "kv_channels": 8}
    values = {"num_experts": 16, "expert_model_parallel_size": 4, "use_dynamic_batch_size": True}
    return SimpleNamespace(**sizes, **values | {"max_tokens_per_gpu": 220, "global_batch_size": 32} | others)


def parallel(ranks=4, context=1):
    return {"dp_size": ranks, "cp_size": context, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def assert_invariants(schedule, kept, lengths, most):
    """What slime's own tests state of a schedule (tests/test_dp_schedule.py)."""
    partitions, micro_batches, numbers, _ = schedule
    for own, places in zip(partitions, micro_batches, strict=True):
        assert len(places) == sum(numbers), "ranks have different numbers of micro-batches"
        assert [place for batch in places for place in batch] == list(range(len(own)))
        assert all(places)
        for batch in places:
            assert len(batch) == 1 or sum(lengths[own[place]] for place in batch) <= most
    assert sorted(sample for own in partitions for sample in own) == sorted(kept)


def members_of_steps(schedule):
    """Return the samples of each optimizer step."""
    partitions, micro_batches, numbers, _ = schedule
    bounds = np.cumsum([0, *numbers])
    return [
        sorted(
            own[place]
            for own, places in zip(partitions, micro_batches, strict=True)
            for batch in places[first:last]
            for place in batch
        )
        for first, last in pairwise(bounds)
    ]


@pytest.mark.parametrize("dynamic", [True, False])
def test_slime_schedules_by_recorded_routes(package, caplog, dynamic):
    package({"slime/utils/dp_schedule.py": SCHEDULE, "slime/observability/rollout_data_utils.py": ROUTES})
    caplog.set_level(logging.INFO)
    slime.install()
    slime.install()
    from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay as validate
    from slime.utils.dp_schedule import build_dp_schedule

    lengths, routes = draw_samples(0, 66)
    rollouts = [min(s // 2, 32) for s in range(66)]  # two samples of each rollout stay in a step; the last is left out
    options = {"global_batch_size": 16, "rollout_indices": rollouts}
    args = arguments(use_dynamic_batch_size=dynamic)
    stock = build_dp_schedule.relibra_stock(args, parallel(), lengths, **options)
    assert not hasattr(build_dp_schedule.relibra_stock, "relibra_stock"), "replaced twice"
    validate(routes, args)
    planned = build_dp_schedule(args, parallel(), lengths, **options)
    assert planned[2:] == stock[2:] == ([4, 4], [16, 16])
    assert planned[0] != stock[0]
    most = 220 if dynamic else max(a + b for a, b in pairwise(lengths))
    assert_invariants(planned, range(64), lengths, most)
    assert members_of_steps(planned) == members_of_steps(stock)
    if not dynamic:
        assert {len(batch) for places in planned[1] for batch in places} == {2}
    [line] = [record.getMessage() for record in caplog.records]
    before, after = (float(part) for part in line.split("rank skew ")[1].split(" (")[0].split(" -> "))
    assert after < before - 0.05
    caplog.clear()
    assert build_dp_schedule(args, parallel(), lengths, **options) == stock, (
        "routes of the last rollout were used again"
    )
    build_dp_schedule(args, parallel(), lengths, **options)
    [line] = [record.getMessage() for record in caplog.records]
    assert "--use-rollout-routing-replay" in line


def test_miles_schedules_by_recorded_routes(package, caplog):
    package({"miles/utils/dp_schedule.py": SCHEDULE, "miles/ray/rollout/train_data_conversion.py": CONVERSION})
    caplog.set_level(logging.INFO)
    slime.install()
    from miles.ray.rollout.train_data_conversion import split_train_data_by_dp_scheduled_raw as split

    lengths, routes = draw_samples(1, 64)
    data = {"tokens": [range(n) for n in lengths], "rollout_ids": list(range(64)), "rollout_routed_experts": routes}
    planned = split(arguments(), data, train_parallel_config=parallel())
    assert_invariants(planned, range(64), lengths, 220)
    assert "rank skew" in caplog.text
    del data["rollout_routed_experts"]
    assert split(arguments(), data, train_parallel_config=parallel())[0] != planned[0]


class Stored:
    """Routes in a file, as vime's references are; counts how many are in memory at once."""

    live = most = 0

    def __init__(self, ids):
        self.ids = ids

    def load(self):
        loaded = self.ids.copy()
        if loaded.size == 0:
            raise FileNotFoundError("sample_7.safetensors")
        Stored.live += 1
        Stored.most = max(Stored.most, Stored.live)
        weakref.finalize(loaded, Stored.gone)
        return loaded

    @classmethod
    def gone(cls):
        cls.live -= 1


def test_vime_schedules_by_routes_in_memory_and_in_files(package, caplog):
    package({"vime/utils/dp_schedule.py": SCHEDULE, "vime/data/batch_builder.py": BUILDER})
    caplog.set_level(logging.INFO)
    slime.install()
    slime.install()
    from vime.data.batch_builder import BatchBuilder

    lengths, routes = draw_samples(1, 64)
    builder = BatchBuilder(arguments())
    builder.train_parallel_config = parallel()
    data = {"tokens": [range(n) for n in lengths], "rollout_ids": list(range(64)), "rollout_routed_experts": routes}
    planned = builder.split_by_dp(data)
    assert_invariants(planned, range(64), lengths, 220)
    assert caplog.text.count("rank skew") == 1
    stored = [Stored(ids) for ids in routes]
    assert builder.split_by_dp(data | {"rollout_routed_experts": stored}) == planned
    assert Stored.most <= available_cores(), "each thread holds the routes of one sample"
    without = {name: data[name] for name in ("tokens", "rollout_ids")}
    stock = builder.split_by_dp(without)
    assert stock[0] != planned[0]
    caplog.clear()
    stored[7] = Stored(np.zeros((0, 3, 2), np.int32))
    assert builder.split_by_dp(data | {"rollout_routed_experts": stored}) == stock
    assert "sample 7 cannot be loaded: FileNotFoundError" in caplog.text


def test_a_schedule_of_other_samples_stays_as_it_is(package, caplog):
    package({"slime/utils/dp_schedule.py": SCHEDULE, "slime/observability/rollout_data_utils.py": ROUTES})
    slime.install()
    from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay as validate
    from slime.utils.dp_schedule import build_dp_schedule

    lengths, routes = draw_samples(0, 64)
    options = {"global_batch_size": 32, "rollout_indices": list(range(64))}
    for args, handed in (
        (arguments(), routes[:63]),
        (arguments(), [*routes[:63], routes[63][:2]]),
        (arguments(num_experts=8), routes),
        (arguments(expert_model_parallel_size=1), routes),
    ):
        caplog.clear()
        validate(handed, args)
        assert build_dp_schedule(args, parallel(), lengths, **options) == build_dp_schedule.relibra_stock(
            args, parallel(), lengths, **options
        )
        assert "used as it is" in caplog.text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "none of slime, miles and vime"),
        ({"vime/utils/dp_schedule.py": SCHEDULE}, "no vime.data.batch_builder"),
        (
            {
                "vime/utils/dp_schedule.py": SCHEDULE.replace("rollout_ind", "group_ind"),
                "vime/data/batch_builder.py": BUILDER,
            },
            "group_indices",
        ),
        ({"slime/utils/dp_schedule.py": "def build_dp_schedule(args): pass"}, "takes"),
        ({"slime/utils/dp_schedule.py": SCHEDULE, "slime/observability/rollout_data_utils.py": ""}, "is missing"),
    ],
)
def test_other_versions_are_refused(package, files, words):
    package(files)
    with pytest.raises(EngineError, match=words):
        slime.install()
