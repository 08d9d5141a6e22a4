"""Experts placed per layer by recorded routes: same answers, fewer rows, and bytes as counted in the trace."""

import subprocess
import sys

import httpx
import numpy as np
import pytest

from relibra.planning.deployment.deployment_files import read_expert_placement, write_expert_placement
from relibra.planning.deployment.expert_placement import ExpertPlacement
from relibra.planning.deployment.expert_workers import place_by_number
from relibra.planning.deployment.worker_choice import choose_workers
from relibra.routing.readers import open_trace
from relibra.serving.roles.checkpoint import read_structure
from tests.serving.in_process import served_in_process
from tests.serving.models import answer_of, assert_same, greedy_answer, greedy_request, write_model
from tests.serving.server_process import relibra_serve
from tests.serving.test_server import answered
from tests.serving.test_split_models import LENGTHS, QUICK, small_layout


def mixed_placement(folder, workers, spare, seed=0):
    """Return a placement with other homes and other copies in each layer."""
    structure, rng = read_structure(folder), np.random.default_rng(seed)
    layers, experts = len(structure.experts), structure.num_experts
    home_LE = np.stack([rng.permutation(np.arange(experts) % workers) for _ in range(layers)])
    home_LNE = home_LE[:, None] == np.arange(workers)[:, None]
    held_LNE = home_LNE.copy()
    for layer, worker in np.ndindex(layers, workers):
        others = np.flatnonzero(~home_LNE[layer, worker])
        held_LNE[layer, worker, rng.permutation(others)[:spare]] = True
    return ExpertPlacement.from_arrays(np.array(structure.layer_ids), home_LNE, held_LNE, 1.05)


def traffic_in_trace(routes_TLK, held_LNE):
    """Return the rows of tokens that go to each worker once, and their choices; no expert has copies."""
    choices = [choose_workers(routes_TLK[:, layer].astype(np.int64), own, 9.0) for layer, own in enumerate(held_LNE)]
    return sum(len(set(token)) for layer in choices for token in layer.tolist()), routes_TLK.size


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(("workers", "spare"), [(3, 0), (2, 1)])
def test_answers_with_a_placement_equal_the_whole_model(name, workers, spare, tmp_path):
    model = write_model(name, tmp_path)
    requests = [greedy_request(number, length, 12) for number, length in enumerate(LENGTHS)]
    expected = [greedy_answer(model, request.prompt, 12) for request in requests]
    placement, layout = mixed_placement(tmp_path, workers, spare), small_layout(experts=workers, attention=2)
    with served_in_process(tmp_path, layout, placement) as served:
        for answer, sequence in zip(expected, served.generate(requests), strict=True):
            assert_same(answer_of(sequence), answer)
        counters = [worker.counters() for worker in served.attention]
        back = [worker.inbox.counters for worker in served.experts]
    sent = {key: sum(one[key] for one in counters) for key in ("rows", "bytes", "empty_messages")}
    assert sent["rows"] == sum(one.rows for one in back)
    if not spare:
        rows, choices = traffic_in_trace(np.concatenate([one.routes for one in expected]), placement.held_LNE)
        row_bytes = 4 * read_structure(tmp_path).hidden
        assert sent["rows"] == rows
        assert sent["bytes"] == rows * row_bytes + 8 * choices
        assert sum(one.bytes for one in back) == rows * row_bytes


def metric(url, name, role="attention"):
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f'relibra_{name}_total{{role="{role}"'))


def relibra(*arguments):
    subprocess.run([sys.executable, "-m", "relibra", *map(str, arguments)], check=True, capture_output=True)


@pytest.mark.slow
def test_routes_are_recorded_placed_and_served(tmp_path):
    folder, traces, file = tmp_path / "model", tmp_path / "routes", tmp_path / "placement.json"
    write_model("Qwen3MoeForCausalLM", folder)
    bodies = [
        {"prompt": list(greedy_request(number, 5 + number, 0).prompt), "max_tokens": 12, "temperature": 0,
         "return_token_ids": True, "ignore_eos": True}
        for number in range(6)
    ]  # fmt: skip

    def texts(*options):
        with relibra_serve(folder, "--experts", "2", *options) as (url, _):
            found = [answered(url, **body)["choices"][0]["token_ids"] for body in bodies]
            return found, {name: metric(url, name) for name in ("rows", "bytes", "empty_messages")}

    plain, sent = texts("--record", str(traces))
    trace = open_trace(traces)
    assert trace.num_samples == len(bodies)
    assert trace.prompt_lengths.tolist() == [5 + number for number in range(6)]
    assert trace.rows_per_sample.tolist() == [5 + number + 12 for number in range(6)]
    relibra("trace", "stats", traces, "--ranks", "2")
    structure = read_structure(folder)
    routes_TLK, row_bytes = trace.experts_TLK[trace.valid_T], 4 * structure.hidden
    rows, choices = traffic_in_trace(
        routes_TLK, np.stack([place_by_number(structure.num_experts, 2)] * trace.num_layers)
    )
    assert (sent["rows"], sent["bytes"]) == (rows, rows * row_bytes + 8 * choices)
    relibra("serve", "place", traces, "--experts", "2", "--cap", "1.2", "--output", file)
    placement = read_expert_placement(file)
    placed, sent = texts("--placement", str(file))
    assert placed == plain
    rows, choices = traffic_in_trace(routes_TLK, placement.held_LNE)
    assert (sent["rows"], sent["bytes"]) == (rows, rows * row_bytes + 8 * choices)
    write_expert_placement(file, mixed_placement(folder, 2, 1))
    assert texts("--placement", str(file), "--rebalance-seconds", "0.5")[0] == plain
