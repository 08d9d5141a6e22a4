"""Work that fails on one rank: all ranks raise, none waits, and the next collective finds all of them."""

import json
import sys
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from relibra.errors import TraceError
from relibra.integrations import verl
from relibra.integrations.expert_layout import ExpertLayout
from relibra.integrations.shared_failures import on_all_ranks
from tests.integrations.routed_samples import draw_samples
from tests.integrations.verl.stand_in import make_batch, stand_in
from tests.spawned_ranks import run_spawned

RANKS, TIMEOUT_S = 2, 60


def said_of(work):
    try:
        return repr(work())
    except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it
        return f"{type(error).__name__}: {error}"


def failing(error, on):
    def work():
        if dist.get_rank() in on:
            raise error
        return "done"

    return lambda: on_all_ranks(work, "count", device="cpu")


@contextmanager
def broken(name, error, on):
    """Let a function of the plug-in of verl raise on one rank."""
    if dist.get_rank() != on:
        yield
        return
    with mock.patch.object(verl, name, side_effect=error):
        yield


def passes_of_verl():
    """Return what a pass of verl's engine says on this rank while parts of the plug-in fail on one rank."""
    engine, modules = stand_in()
    sys.modules.update(modules)
    # Each data-parallel rank feeds all experts alone, so the stand-in's group of one is right.
    layout = ExpertLayout(num_experts=16, expert_ranks=4, group_ranks=1, token_price=0.0, pair_price=0.0)
    verl.install()
    data = make_batch(*draw_samples(5, 32))
    found = {}
    with mock.patch.object(ExpertLayout, "of_megatron", return_value=layout):
        for name, error, on in (
            ("sample_routes", KeyError("routed_experts"), 1),
            ("own_table", MemoryError(), 0),
            ("repack_tables", MemoryError("3 GB"), 0),
            ("sample_lengths", TraceError("no lengths"), 1),
        ):
            with broken(name, error, on):
                found[name] = said_of(lambda: len(engine.cut(data)[1]))
        found["whole"] = said_of(lambda: len(engine.cut(data)[1]))
    return found


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20)
    )
    cases = {
        "none": failing(KeyError("x"), ()),
        "key": failing(KeyError("layer 3"), (1,)),
        "memory": failing(MemoryError(), (0,)),
        "sentence": failing(TraceError("é" * 600), (1,)),
        "both": failing(ValueError("both"), (0, 1)),
    }
    found = {name: said_of(case) for name, case in cases.items()} | passes_of_verl()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what each rank heard in each case."""
    folder = tmp_path_factory.mktemp("failures")
    run_spawned(work, (folder,), RANKS, TIMEOUT_S)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_the_failed_rank_raises_and_others_repeat_it(found):
    first, second = found
    assert [one["none"] for one in found] == ["'done'"] * RANKS
    assert second["key"] == "KeyError: 'layer 3'"
    assert first["key"] == "EngineError: rank 1 cannot count, and no rank goes on: KeyError: 'layer 3'"
    assert first["memory"] == "MemoryError: "
    assert "rank 0 cannot count" in second["memory"]
    assert second["memory"].endswith("MemoryError")
    assert first["sentence"].count("é") == 256, "a long sentence is cut between letters"
    assert [one["both"] for one in found] == ["ValueError: both"] * RANKS


def test_no_rank_waits_where_verls_plug_in_fails(found):
    first, second = found
    assert second["sample_routes"] == "KeyError: 'routed_experts'"
    assert "rank 1 cannot count the loads of its samples" in first["sample_routes"]
    assert first["own_table"] == "MemoryError: "
    assert "rank 0 cannot count" in second["own_table"]
    assert first["repack_tables"] == "MemoryError: 3 GB"
    assert "rank 0 cannot plan the micro-batches" in second["repack_tables"]
    for one in found:
        assert one["sample_lengths"] == one["whole"] == "4", "routes that do not fit are no error: verl's micro-batches"


def test_a_process_alone_only_calls_the_function():
    assert on_all_ranks(lambda: 3, "count", device="cpu") == 3
    with pytest.raises(KeyError):
        on_all_ranks(lambda: {}["x"], "count", device="cpu")
