"""Recorded routes of real models, where a checkout has them beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parent.parent.parent / "shared" / "data"

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(),
    reason=f"recorded routes of real models are not there ({DATA}); synthetic ones are tested elsewhere",
)


def _stats(name, *options):
    command = [sys.executable, "-m", "relibra", "trace", "stats", str(DATA / name), "--json", *options]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_gpt_oss_skew_of_the_static_layout():
    result = _stats("gpt_oss_20b_decode_topk.npz", "--ranks", "8,16,32", "--rows-per-micro-batch", "2048")
    assert (result["rows"], result["layers"], result["experts"], result["top_k"]) == (90_145, 24, 32, 4)
    means = [row["skew_mean"] for row in result["layouts"]]
    assert means == pytest.approx([1.7, 2.5, 3.9], rel=0.02)


@pytest.mark.parametrize(
    ("task", "tokens", "skews"),
    [
        ("intent", 8222, [1.44, 1.80, 2.45, 3.81]),
        ("law", 8327, [1.39, 1.70, 2.35, 3.52]),
        ("summary", 8479, [1.40, 1.83, 2.68, 4.28]),
        ("translation", 8251, [1.69, 2.36, 3.54, 5.62]),
    ],
)
def test_deepseek_v2_lite_skew_per_task(task, tokens, skews):
    options = ("--ranks", "8,16,32,64", "--rows-per-micro-batch", "1000000", "--group", task)
    result = _stats("deepseek_v2_lite_esft_topk.npz", *options)
    assert result["rows"] == tokens
    assert [round(row["skew_mean"], 2) for row in result["layouts"]] == pytest.approx(skews, abs=0.011)


def test_deepseek_v2_lite_prints_skew_for_three_sizes():
    command = [sys.executable, "-m", "relibra", "trace", "stats", str(DATA / "deepseek_v2_lite_esft_topk.npz")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for ranks in (8, 16, 32):
        assert any(line.replace("│", " ").split()[:1] == [str(ranks)] for line in out.splitlines()), out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "experts", "model"),
    [
        ("gpt_oss_20b_decode_topk.npz", "32", "gpt-oss-20b"),
        ("deepseek_v2_lite_esft_topk.npz", "64", "deepseek-v2-lite"),
    ],
)
def test_relibra_is_first_in_its_sweep(file, experts, model):
    full = ("--ranks", "16", "--micro-batch-tokens", "8192", "--micro-batches", "2", "--model", model)
    balancers = "relibra,static,flashlb,eplb,ultraep,moonep"
    words = ("sweep", str(DATA / file), *full, "--num-experts", experts, "--balancer", balancers, "--json")
    done = subprocess.run([sys.executable, "-m", "relibra", *words], capture_output=True, text=True, check=True)
    rows = {row["balancer"]: row["seconds"] for row in json.loads(done.stdout)["rows"]}
    assert rows["relibra"] <= min(rows.values()) * 1.0001
