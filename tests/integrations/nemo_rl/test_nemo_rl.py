"""NeMo-RL's bins: its invariants hold, loads get even, and where routes lack, nothing changes.

Quick: stand-ins have the names and arguments of NeMo-RL's functions. test_nemo_rl_source.py runs its own.
"""

import logging
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import EngineError, TraceError
from relibra.integrations import nemo_rl
from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.hooks import WarnOnce
from tests.integrations.routed_samples import draw_samples

RANKS, CAPACITY = 4, 400
LAYOUT = ExpertLayout(num_experts=16, expert_ranks=4, group_ranks=4, token_price=0.0, pair_price=0.0)


def pack_in_order(lengths, ranks):
    """Return bins of samples in order, as many as a multiple of ranks."""
    bins = [[]]
    for sample, length in enumerate(lengths):
        if sum(lengths[s] for s in bins[-1]) + length > CAPACITY:
            bins.append([])
        bins[-1].append(sample)
    while len(bins) % ranks:
        bins.append([max(bins, key=len).pop()])
    return bins


@settings(max_examples=8)
@given(st.integers(0, 99), st.sampled_from([1, 2, 4]))
def test_bins_keep_every_sample_and_their_capacity(seed, group_ranks):
    lengths, routes = draw_samples(seed, 64)
    layout = ExpertLayout(num_experts=16, expert_ranks=4, group_ranks=group_ranks, token_price=1.0, pair_price=0.1)
    bins = pack_in_order(lengths, RANKS)
    repacked, step = nemo_rl.repack_bins(
        bins,
        num_ranks=RANKS,
        routes=routes,
        padded_S=np.array(lengths),
        layout=layout,
        rank_tokens=CAPACITY,
        since=time.perf_counter(),
    )
    assert len(repacked) == len(bins)
    assert sorted(s for one in repacked for s in one) == list(range(64))
    assert all(0 < sum(lengths[s] for s in one) <= CAPACITY for one in repacked)
    assert step.skew[1] <= step.skew[0]
    groups = [{s for n, one in enumerate(some) if n % RANKS < group_ranks for s in one} for some in (bins, repacked)]
    assert groups[0] == groups[1], "samples stay with the ranks that share experts"


def test_bins_that_lack_samples_are_refused():
    lengths, routes = draw_samples(0, 8)
    options = {"num_ranks": 1, "padded_S": np.array(lengths), "layout": LAYOUT, "rank_tokens": 900, "since": 0.0}
    for bins, given_routes in (([[0, 1]], routes), ([list(range(8))], routes[1:])):
        with pytest.raises(TraceError, match="of 8 samples"):
            nemo_rl.repack_bins(bins, routes=given_routes, **options)


class Batch(dict):
    """A batch that asks the packer of its module, once for each step."""

    module = None

    def shard_by_batch_size(
        self,
        shards,
        batch_size=None,
        allow_uneven_shards=False,  # noqa: ARG002
        dynamic_batching_args=None,  # noqa: ARG002
        sequence_packing_args=None,  # noqa: ARG002
    ):
        packer = self.module.get_packer(
            algorithm="any",
            bin_capacity=CAPACITY,
            collect_metrics=False,
            min_bin_count=shards,
            bin_count_multiple=shards,
        )
        lengths = self["input_lengths"].tolist()
        size = batch_size or len(lengths)
        steps = [
            [[first + s for s in one] for one in packer.pack(sequence_lengths=lengths[first : first + size])]
            for first in range(0, len(lengths), size)
        ]
        return [one for step in steps for one in step], None


@pytest.fixture
def policy(monkeypatch):
    """Return a policy of stand-ins of NeMo-RL's modules; its `_shard_for_*` return bins."""
    batches = ModuleType("nemo_rl.distributed.batched_data_dict")
    policies = ModuleType("nemo_rl.models.policy.lm_policy")
    flops = ModuleType("nemo_rl.utils.flops_tracker")

    def get_packer(algorithm, bin_capacity, collect_metrics=False, min_bin_count=None, bin_count_multiple=None):
        return SimpleNamespace(pack=lambda sequence_lengths: pack_in_order(sequence_lengths, bin_count_multiple))

    class Policy:
        use_sequence_packing, data_parallel_size = True, RANKS

        def __init__(self):
            megatron = {"enabled": True, "tensor_model_parallel_size": 1, "context_parallel_size": 1}
            self.cfg = {"model_name": "m", "megatron_cfg": {**megatron, "expert_model_parallel_size": 4}}

        def _shard_for_logprob(self, data):
            return data.shard_by_batch_size(RANKS, sequence_packing_args={})

        def _shard_for_train(self, data, batch_size):
            return data.shard_by_batch_size(RANKS, batch_size=batch_size, sequence_packing_args={})[0]

    model = SimpleNamespace(
        n_routed_experts=16, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    flops.get_default_hf_config = lambda _: SimpleNamespace(get_text_config=lambda: model)
    batches.get_packer, batches.BatchedDataDict, policies.Policy = get_packer, Batch, Policy
    monkeypatch.setattr(Batch, "module", batches)
    for module in (batches, policies, flops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(nemo_rl, "unplanned", WarnOnce(logging.getLogger("relibra.nemo_rl"), "bins stay"))
    return Policy()


def make_batch(samples=64, *, routes=True, seed=3):
    lengths, ids = draw_samples(seed, samples)
    padded = np.zeros((samples, max(lengths), *ids[0].shape[1:]), dtype=np.int16)
    for s, one in enumerate(ids):
        padded[s, : len(one)] = one
        padded[s, len(one)] = -1
    batch = Batch(input_lengths=torch.tensor(lengths))
    if routes:
        batch["routed_experts"] = torch.from_numpy(padded)
    return batch


def test_each_step_is_packed_by_its_own_routes(policy, caplog):
    batch = make_batch()
    stock = policy._shard_for_train(batch, 32)
    nemo_rl.install()
    nemo_rl.install()
    caplog.clear()
    bins = policy._shard_for_train(batch, 32)
    assert bins != stock
    assert len(bins) == len(stock)
    assert all(len({s // 32 for s in one}) == 1 for one in bins)
    assert sorted(s for one in bins for s in one) == list(range(64))
    assert [record.getMessage().count("update of 32 samples") for record in caplog.records] == [1, 1]
    caplog.clear()
    policy._shard_for_logprob(batch)
    assert "log-probs of 64 samples" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"megatron_cfg": {"enabled": False}}, "not trained by Megatron"),
        ({"megatron_cfg": None}, "not trained by Megatron"),
        ({"sequence_packing": {"microbatch_order": "largest_first"}}, "microbatch_order=packer"),
    ],
)
def test_policies_that_cannot_be_planned_keep_their_bins(policy, caplog, change, words):
    batch = make_batch()
    policy.cfg.update(change)
    stock = policy._shard_for_train(batch, 32)
    nemo_rl.install()
    assert policy._shard_for_train(batch, 32) == stock
    assert policy._shard_for_train(batch, 32) == stock
    assert caplog.text.count(words) == 1


def test_batches_without_routes_keep_their_bins(policy, caplog):
    batch = make_batch(routes=False)
    stock = policy._shard_for_train(batch, 64)
    nemo_rl.install()
    assert policy._shard_for_train(batch, 64) == stock
    assert "router_replay.enabled=true" in caplog.text
    assert make_batch().shard_by_batch_size(RANKS)[0] == stock, "no policy, as in a transfer queue"
    assert "data_plane.enabled=false" in caplog.text


def test_policies_that_pack_nothing_say_how_to_switch_it_on(policy, caplog):
    policy.use_sequence_packing = False
    nemo_rl.install()
    policy._shard_for_logprob(make_batch())
    assert "sequence_packing.enabled=true" in caplog.text


def test_other_versions_of_nemo_rl_are_refused(policy):
    type(policy)._shard_for_train = lambda data: data
    with pytest.raises(EngineError, match="relibra was written for"):
        nemo_rl.install()


def test_the_command_names_what_it_needs(tmp_path):
    for arguments, words in (([], "usage"), ([str(tmp_path / "none.py")], "is not a file")):
        done = subprocess.run(
            [sys.executable, "-m", "relibra.integrations.nemo_rl", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert words in done.stderr
