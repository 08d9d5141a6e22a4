"""Ledgers and estimates, without a dry run."""

import gc
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config

from relibra.rl.config.run_config import load_config
from relibra.rl.memory.estimate import GIB, Estimate, Peak, choose_estimate, extrapolate
from relibra.rl.memory.estimator import DeviceMemory, Help, device_memory, refusal, with_estimate, with_setting
from relibra.rl.memory.ledger import Ledger
from relibra.rl.memory.worker import cache_of_rollout, estimate_by_plan, with_cache


def estimate(gib, device=80.0):
    peaks = (Peak(phase="update", parts={"weights": gib * GIB}, line="here"),)
    sizes = {"model": "one", "ranks": 8, "tokens": 8192, "host_bytes": 0.0}
    return Estimate(peaks=peaks, device_bytes=device * GIB, device_name="gpu", **sizes)


def test_a_ledger_counts_storages_once_and_owners_afterwards():
    ledger = Ledger()
    ledger.begin("first")
    kept = torch.zeros(1024)
    ledger.see(kept, "activations", "a")
    ledger.see(kept.view(2, 512), "activations", "b")
    ledger.see(torch.zeros(2048), "activations", "c")  # freed at once
    gc.collect()
    ledger.begin("second")
    ledger.own("weights", [kept, None])
    assert ledger.now == 4096
    peaks = ledger.peaks()
    assert peaks["first"]["c"] == {"weights": 4096, "activations": 8192}
    assert peaks["second"][""]["weights"] == 4096
    assert "b" not in peaks["first"]


def test_the_cache_of_latent_attention_has_whole_keys_and_values():
    config = load_config(
        None,
        [
            "update.mini_batches=1",
            "rollout.prompts_per_step=1",
            "rollout.responses_per_prompt=2",
            "rollout.max_batch=2",
        ],
    )
    text = DeepseekV3Config(num_hidden_layers=3)
    tokens = 2 * (config.rollout.max_prompt + config.rollout.max_response)
    assert cache_of_rollout(config, text, ranks=1) == tokens * 3 * 128 * (128 + 64 + 128) * 4


def test_a_kept_cache_is_there_in_every_phase_of_a_step():
    peaks = tuple(Peak(phase=phase, parts={"weights": 7.0}, line="") for phase in ("load", "rollout", "update"))
    for stays, expected in ((False, (7, 12, 7)), (True, (7, 17, 12))):  # an evaluation has a cache of its own
        assert tuple(one.total for one in with_cache(peaks, 5.0, stays=stays)) == expected


def test_peaks_in_a_place_are_told_apart():
    """The fuller one of few layers is not that of many: both are lines of an estimate."""
    ledger, kept = Ledger(), []
    ledger.begin("update")
    for place, sizes in (("the last layer", (300, 4096)), ("", (200,)), ("the first layer", (8192,))):
        ledger.place = place
        for size in sizes:
            kept.append(torch.zeros(size, dtype=torch.uint8))
            ledger.see(kept[-1], "activations", "line")
        del kept[1:]
        gc.collect()
    peaks = ledger.peaks()["update"]
    assert sum(peaks["line"].values()) == sum(peaks["line in the first layer"].values()) == 512 + 8192
    assert sum(peaks["line in the last layer"].values()) == 512 + 4096
    assert set(peaks) == {"", "line", "line in the first layer", "line in the last layer"}


def test_page_locked_memory_is_a_power_of_two():
    ledger = Ledger()
    ledger.see(torch.zeros(1025), "page-locked", "", power_of_two=True)
    ledger.see(kept := torch.zeros(1025), "page-locked", "", power_of_two=True)
    assert ledger.now == 8192
    del kept


def test_another_line_may_be_highest_in_more_layers():
    first = {"update": {"loss": {"logits": 10}, "layer": {"weights": 2, "activations": 2}}}
    second = {"update": {"loss": {"logits": 10}, "layer": {"weights": 4, "activations": 2}}}
    [few] = extrapolate(first, second, (2, 4), 6)
    assert (few.line, few.total) == ("loss", 10)
    [many] = extrapolate(first, second, (2, 4), 20)
    assert many.parts == {"weights": 20, "activations": 2}


def test_a_line_is_straight_where_its_parts_change_places():
    first = {"update": {"layer": {"weights": 2, "activations": 8}}}
    second = {"update": {"layer": {"weights": 8, "activations": 4}}}
    [many] = extrapolate(first, second, (2, 4), 10)
    assert many.total == pytest.approx(10 + 8)
    assert many.parts["activations"] == 0


def test_an_estimate_survives_json():
    found = estimate(70.0)
    assert Estimate.from_json(found.as_json()) == found


@pytest.mark.parametrize(("gib", "fits"), [(72.0, True), (73.0, False)])
def test_a_tenth_of_the_device_stays_free(gib, fits):
    assert estimate(gib).fits == fits
    assert estimate(gib).free_bytes == pytest.approx(max(0, 72 - gib) * GIB)


def test_what_does_not_fit_names_settings_and_what_they_save():
    helping = [Help(setting="update.offload=moments", saves=28.4 * GIB, fits=True)]
    sentence = refusal(estimate(90.0), helping)
    assert all(part in sentence for part in ("90.0 GiB", "update", "72.0", "update.offload=moments saves 28.4"))


def test_the_device_is_that_of_the_cluster():
    config = load_config(None, ["plan.cluster=h100x8"])
    assert device_memory(config) == DeviceMemory(nbytes=0.99 * 80 * GIB, name="h100x8")


def test_a_setting_that_has_the_value_is_no_lever():
    config = load_config(None)
    assert with_setting(config, "plan.slots", config.plan.slots) is None
    assert with_setting(config, "plan.slots", 3).plan.slots == 3


@pytest.mark.parametrize(
    ("on_device", "on_host", "chosen", "other_seconds"),
    [
        ({"gib": 60.0, "added_seconds": -1.0}, {"gib": 40.0, "added_seconds": -3.0}, "moments", -1.0),
        ({"gib": 60.0, "added_seconds": -1.0}, {"gib": 40.0, "added_seconds": 0.5}, "off", 0.5),
        ({"gib": 75.0, "added_seconds": 0.0}, {"gib": 40.0, "added_seconds": 0.5}, "moments", None),
        ({"gib": 90.0, "added_seconds": 0.0}, {"gib": 75.0, "added_seconds": -1.0}, "off", None),
    ],
)
def test_moments_are_where_a_step_ends_first(on_device, on_host, chosen, other_seconds):
    ways = zip(("off", "moments"), (on_device, on_host), strict=True)
    found = choose_estimate(
        [
            replace(estimate(one["gib"]), chosen={"update.offload": way}, added_seconds=one["added_seconds"])
            for way, one in ways
        ]
    )
    assert (found.chosen, found.other_seconds) == ({"update.offload": chosen}, other_seconds)
    assert found.choice_line.startswith(f"update.offload={chosen} (" if found.fits else "")
    assert with_estimate(load_config(None, ["update.offload=plan"]), found).update.offload == chosen


def test_size_of_micro_batches_is_the_fastest_that_fits():
    """Passes of the fewest micro-batches are fastest; the largest of them do not fit."""
    settings = ["update.micro_batch_tokens=0", "update.offload=plan", "parallel.ranks=2", "rollout.prompts_per_step=16"]
    config, seen = load_config(None, settings), []
    longest = config.rollout.max_prompt + config.rollout.max_response - 1

    def estimated(one):
        seen.append((one.update.offload, one.update.micro_batch_tokens // longest))
        moved = one.update.offload == "moments"
        gib = 20.0 * one.update.micro_batch_tokens / longest - 40.0 * moved
        return replace(estimate(gib), added_seconds=1e-3 * moved)

    found, best = estimate_by_plan(config, estimated, DeviceMemory(nbytes=80.0 * GIB, name="h100x8"))
    assert seen == [(way, number) for way in ("off", "moments") for number in (1, 2, 4, 8)]
    chosen = found.update.offload, found.update.micro_batch_tokens // longest
    priced = {("off", 2): 0.0, ("moments", 4): 1e-3}  # the largest that fit
    assert chosen in priced
    assert best.chosen == {"update.offload": chosen[0], "update.micro_batch_tokens": chosen[1] * longest}
    assert best.added_seconds > priced[chosen], "with its passes"
    assert best.other_seconds >= best.added_seconds


def test_without_an_estimate_settings_are_the_usual_ones(caplog):
    by_plan = load_config(None, ["update.offload=plan", "update.micro_batch_tokens=0"])
    update = with_estimate(by_plan, None).update
    assert (update.offload, update.micro_batch_tokens) == ("off", 2048)
    assert len(caplog.records) == 1
    found = replace(estimate(60.0), chosen={"update.offload": "moments", "update.micro_batch_tokens": 8192})
    update = with_estimate(by_plan, found).update
    assert (update.offload, update.micro_batch_tokens) == ("moments", 8192)
