"""Experts that move take all that training knows about them along, and nobody outside notices where they are."""

import json
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from tests.parallel.ranks_at_work import on_ranks
from tests.parallel.relocations import (
    NUM_MAPS,
    Setting,
    follow_train_save,
    lose_a_rank,
    refuse_all,
    swap_where_ranks_hold_no_rows,
)
from tests.replay.tiny_models import random_tokens

pytestmark = pytest.mark.slow

SETTINGS = {
    "2 ranks": {"whole": Setting(num_ranks=2), "biases": Setting(num_ranks=2, family="gpt_oss")},
    "4 ranks": {"one group": Setting(num_ranks=4, ep_size=4), "efsdp 2": Setting(num_ranks=4)},
    "4 ranks, oddly": {
        "efsdp 2, chunks of 2 and 1": Setting(num_ranks=4, num_experts=6),
        "two replicas": Setting(num_ranks=4, dp_replicate_size=2),
    },
}


@pytest.fixture(scope="module", params=SETTINGS)
def found(request, tmp_path_factory):
    """What each rank found, by setting."""
    settings = SETTINGS[request.param]
    num_ranks = next(iter(settings.values())).num_ranks
    results = on_ranks(num_ranks, settings, tmp_path_factory.mktemp("relocation"), follow_train_save)
    return [(settings[name], results_R) for name, results_R in results.items()]


def test_rows_follow_their_experts_bit_for_bit(found):
    for setting, results_R in found:
        followed_R = [result["followed"] for result in results_R]
        per_replica = setting.num_ranks // setting.dp_replicate_size
        for first in range(0, setting.num_ranks, per_replica):
            replica = followed_R[first : first + per_replica]
            before = {key: row for result in replica for key, row in result["before"].items()}
            names = {name.partition(".")[2] for _, name, _ in before}
            assert names == {"", "grad", "exp_avg", "exp_avg_sq", "compressed", "flags"}
            for n in range(NUM_MAPS + 1):
                after = {key: row for result in replica for key, row in result["after"][n].items()}
                assert after.keys() == before.keys()
                assert all(torch.equal(after[key], before[key]) for key in before)


def test_parameters_gradients_and_states_stay_the_same_objects(found):
    assert all(result["followed"]["same objects"] for _, results_R in found for result in results_R)


def test_bytes_move_only_for_experts_that_move(found):
    for setting, results_R in found:
        followed_R = [result["followed"] for result in results_R]
        expert_bytes = max(result["expert bytes"] for result in followed_R)
        maps = [np.tile(np.arange(setting.num_experts), (3, 1)), *(setting.maps(seed) for seed in range(NUM_MAPS))]
        moved = [int((old != new).sum()) for old, new in pairwise(maps)]
        for result in followed_R:
            assert [experts for experts, _ in result["moved"]] == moved
            assert result["two moved"][0] == 2
            assert result["none moved"] == (0, 0)
        sent = sum(result["two moved"][1] for result in followed_R)
        assert sent == 2 * expert_bytes * setting.dp_replicate_size


def test_training_with_moving_experts_equals_training_without(found):
    """Bit for bit: the same rows in the same order, wherever the expert is."""
    for _, results_R in found:
        for result in results_R:
            torch.testing.assert_close(result["trained"], result["trained at home"], rtol=0, atol=0)


def test_saved_in_logical_order_it_is_the_dense_model(found):
    ids_BN = random_tokens(2, 8)
    for setting, results_R in found:
        dense = setting.dense
        saved = AutoModelForCausalLM.from_pretrained(
            results_R[0]["saved"]["path"], dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            assert torch.equal(saved(ids_BN).logits, dense(ids_BN).logits)
        for result in results_R:
            assert result["saved"]["inside"] == [list(range(setting.num_experts))] * 3
            assert result["saved"]["back"]
            assert result["saved"]["back after an error"]
            assert result["saved"]["parameters"].keys() == dict(dense.named_parameters()).keys()
            for name, parameter in dense.named_parameters():
                assert torch.equal(result["saved"]["parameters"][name], parameter), name


def test_ranks_without_rows_take_part(tmp_path):
    cases = {"swap": Setting(num_ranks=4, num_experts=2)}
    results_R = on_ranks(4, cases, tmp_path, swap_where_ranks_hold_no_rows)["swap"]
    assert [len(result["rows"]) for result in results_R] == [1, 1, 0, 0]
    assert [result["relocation"] for result in results_R] == [(2, 24), (2, 24), (2, 0), (2, 0)]
    for result in results_R:
        assert torch.equal(result["momentum"], -result["rows"])
        assert torch.equal(result["gathered"], result["whole"].flip(0))
        assert torch.equal(result["logical"], result["whole"])


EXPECTED = {
    "other shape": ("has shape (2, 8), the model has 3 layers of 8 experts",),
    "no permutation": ("layer 1: the map of homes [", "] is no permutation of 0 to 7"),
    "no permutation on one rank": (),
    "different maps": ("ranks [1] have another map of homes (old or new) than rank 0",),
    "optimizer on one rank": ("ranks [1] have other gradients or optimizer states than rank 0",),
    "another optimizer": ("layer 0: the optimizer does not train gate_up_proj",),
    "factored state": ("layer 1: optimizer state 'row' of gate_up_proj is a Tensor of shape (4, 1)",),
    "nested state": ("layer 1: optimizer state 'factors' of gate_up_proj is a list",),
    "executing": ("the model is executing a plan",),
    "unreduced gradients": ("layer 0: gradients of earlier micro-batches wait to be reduced",),
    "afterwards": ("no error",),
}


def test_refusals_come_before_anything_moves(tmp_path):
    messages_R = on_ranks(2, {"refusals": Setting(num_ranks=2)}, tmp_path, refuse_all)["refusals"]
    for messages in messages_R:
        assert messages.keys() == EXPECTED.keys()
        for name, message in messages.items():
            assert all(part in message for part in EXPECTED[name]), (name, message)
    assert messages_R[0]["no permutation on one rank"].startswith("ranks [1] refuse to move experts")
    assert "is no permutation" in messages_R[1]["no permutation on one rank"]


@pytest.mark.parametrize("fault", ["killed before its rows", "killed before the word", "stopped"])
def test_a_lost_rank_leaves_layer_and_checkpoint_as_they_were(tmp_path, fault):
    setting, timeout_s = Setting(num_ranks=4), 15.0
    setting.dense.save_pretrained(tmp_path / setting.model_name)
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=lose_a_rank, args=(rank, setting, tmp_path, fault, timeout_s)) for rank in range(4)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + 110
        for rank in (0, 2, 3):
            processes[rank].join(timeout=deadline - time.monotonic())
            assert processes[rank].exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    assert processes[1].exitcode == -9
    for rank in (0, 2, 3):
        survivor = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert f"rank {rank}, layer 1: moving experts (the layer is unchanged) with ranks" in survivor["message"]
        assert survivor["seconds"] < timeout_s + 5
        assert survivor["homes"] == [setting.maps(1)[0].tolist(), *setting.maps(0)[1:].tolist()]
        assert survivor["rows kept"] == [False, True, True]
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).named_parameters())
    whole = torch.load(tmp_path / "whole.pt")
    assert whole.keys() == saved.keys()
    assert all(torch.equal(whole[name], saved[name]) for name in whole)
