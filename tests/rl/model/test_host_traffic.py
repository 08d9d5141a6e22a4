"""Bytes and seconds of copies to host memory and back."""

import pytest

from relibra.cluster import cluster_preset
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.host_traffic import HostTraffic, host_traffic


def test_moments_of_a_30b_take_half_a_second_per_optimizer_step():
    machine, trained = cluster_preset("h100x8", 8), 30.53e9 / 8
    once = host_traffic(UpdateSettings(offload="moments"), trained=trained, optimizer_steps=1)
    assert once == HostTraffic(both_ways=8 * trained)
    assert once.seconds(machine) == pytest.approx(8 * trained / 64e9, rel=1e-3)
    assert once.seconds(machine) == pytest.approx(0.48, abs=0.01)
    eight = host_traffic(UpdateSettings(offload="moments"), trained=trained, optimizer_steps=8)
    assert eight.seconds(machine) == pytest.approx(8 * once.seconds(machine), rel=1e-3)


def test_weights_come_and_go_with_what_is_idle():
    off, moments, all_ = (UpdateSettings(offload=mode) for mode in ("off", "moments", "all"))
    sizes = {"trained": 10.0, "optimizer_steps": 2, "idle_trained": 5.0, "frozen_bytes": 7.0}
    assert host_traffic(off, **sizes) == HostTraffic()
    assert host_traffic(moments, **sizes) == HostTraffic(both_ways=240.0, inward=47.0, outward=40.0)
    assert host_traffic(all_, **sizes) == HostTraffic(both_ways=240.0, inward=87.0, outward=80.0)
    assert host_traffic(moments, trained=10.0, optimizer_steps=2).inward == 0
