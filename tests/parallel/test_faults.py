"""A rank that dies or hangs ends the step of all others with an error that says where; nobody waits forever."""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from relibra import EngineError
from relibra.errors import LostPeerError
from relibra.parallel.rows.exchange import Place, explain_peer_failure
from tests.parallel.faults import GROUP_TIMEOUT_S, Fault, survivors_of
from tests.parallel.steps import on_nodes, step

slow = pytest.mark.slow

OF_TWO = {
    "killed in an exchange": Fault(moment="exchange", rank=1, layer=1),
    "killed in an exchange of gradients": Fault(moment="exchange of gradients", rank=1, layer=1),
    "killed in a push": Fault(moment="push", rank=0, layer=1),
    "killed in a return": Fault(moment="return", rank=1, layer=1),
    "killed outside of the experts": Fault(moment="model", rank=1),
    "hangs in an exchange": Fault(moment="exchange", rank=1, layer=1, hangs=True),
}
OF_FOUR = {
    "killed in an exchange": Fault(moment="exchange", rank=2, layer=1),
    "killed in a push": Fault(moment="push", rank=3, layer=2),
    "killed in a return": Fault(moment="return", rank=1, layer=1, micro_batch=0),
    "hangs in a return": Fault(moment="return", rank=1, layer=1, hangs=True),
}


def assert_all_say_where(fault, found, num_ranks):
    """Say who, where in the step and with whom; survivors that waited for another survivor too."""
    assert len(found) == num_ranks - 1
    for rank, one in found.items():
        pattern = r"rank (\d+), layer (\d+), micro-batch (\d+): the .* with ranks (\[.*\]) failed: \["
        match = re.match(pattern, one["message"])
        assert match, one["message"]
        assert int(match[1]) == rank
        assert int(match[2]) in (0, 1, 2)
        assert int(match[3]) == fault.micro_batch
        peers = set(json.loads(match[4]))
        assert peers
        assert peers <= set(range(num_ranks)) - {rank}
        assert "look for the first error among those ranks" in one["message"]
        assert one["seconds"] < GROUP_TIMEOUT_S * fault.hangs + 10


@slow
@pytest.mark.parametrize("name", OF_TWO)
def test_the_survivor_of_two_says_where(tmp_path, name):
    fault = OF_TWO[name]
    case = step(replicas=[(1, 0, 0, 0.5), (0, 0, 6, 0.5)], in_flight="gradients" in name)
    found = survivors_of(2, case, fault, tmp_path / "work")
    assert_all_say_where(fault, found, 2)
    (one,) = found.values()
    if "exchange" in name:  # both ranks are in it at once
        assert f"layer {fault.layer}, " in one["message"]
        assert ": the exchange of rows with ranks [0] failed" in one["message"].replace("[1]", "[0]")


@slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_the_survivors_of_four_say_where(tmp_path, name):
    schedule = ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)
    replicas = [(1, 0, 0, 0.3), (2, 0, 0, 0.3), (0, 0, 6, 0.5), (3, 0, 2, 0.5)]
    case = step(4, lengths=range(5, 13), schedule=schedule, replicas=replicas, checkpointing="push" in name)
    fault = OF_FOUR[name]
    assert_all_say_where(fault, survivors_of(4, case, fault, tmp_path / "work"), 4)


@slow
@pytest.mark.parametrize("name", ["killed in an exchange", "killed in a return"])
def test_with_canonical_sums_too(tmp_path, name):
    case = step(replicas=[(1, 0, 0, 0.9), (0, 0, 6, 0.9)], sums="canonical")  # a chunk goes where most of it is
    fault = replace(OF_TWO[name], moment="canonical return") if "return" in name else OF_TWO[name]
    assert_all_say_where(fault, survivors_of(2, case, fault, tmp_path / "work"), 2)


@slow
def test_a_killed_relay_is_named(tmp_path):
    schedule = ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)
    case = on_nodes(step(4, lengths=range(5, 13), schedule=schedule), 2)
    fault = Fault(moment="forwarding", rank=2, layer=1)
    found = survivors_of(4, case, fault, tmp_path / "work")
    assert_all_say_where(fault, found, 4)
    assert ": the exchange of rows with ranks [0, 1, 2] failed" in found[3]["message"]


PLACE = Place(0, 3, 1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation"),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error"),
        dist.DistStoreError("wait timeout after 15000ms"),
    ],
)
def test_a_lost_peer_is_named(error):
    with pytest.raises(LostPeerError, match=r"rank 0, layer 3, micro-batch 1: the push with ranks \[1, 2\]") as caught:
        _raise(error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (9x32 and 16x32)"),
        RuntimeError("Split sizes doesn't match total dim 0 size"),
        RuntimeError("ProcessGroupGloo::alltoall_base: invalid tensor type at index 0"),
        RuntimeError("peer access is not supported between these two devices"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error: out of memory"),
        EngineError("somebody has said already what is wrong: timed out waiting"),
        ValueError("connection closed by peer"),
    ],
)
def test_what_no_peer_did_stays_as_it_is(error):
    with pytest.raises(type(error), match=re.escape(str(error))) as caught:
        _raise(error)
    assert caught.value is error


def _raise(error):
    with explain_peer_failure("the push", PLACE, range(3)):
        raise error
