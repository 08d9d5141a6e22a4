"""`relibra serve` beside a vLLM server: the same model, the same requests, both cores of this machine.

Run: relibra bench beside_vllm VLLM_PYTHON [--quick] [--json] [--output FOLDER]. Five minutes; VLLM_PYTHON is the
interpreter of an environment with vLLM (`make demo-vllm` makes .venv-vllm/bin/python). Streams of 128 tokens each, all
sent at once; turns alternate. Rows go to results/beside_vllm.json; --quick sends few and writes none.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from examples.demos import local_vllm, serve

MODEL = (
    "model.hidden_size=512", "model.num_layers=6", "model.num_experts=16", "model.experts_per_token=4",
    "model.expert_width=512", "rollout.engine=vllm", "rollout.url=http://127.0.0.1:1",
)  # fmt: skip
STREAMS = (8, 32, 64)
TOKENS, PROMPT_TOKENS, TURNS = 128, 24, 3
TARGET = 0.8
OWN_FLAGS = ("--experts", "1", "--threads", "1")
UNIT = "tokens per second of all streams together, median of turns; CPU: per CPU second of the server's processes"


def main() -> None:
    parser = measurement_options(__doc__)
    parser.add_argument("vllm_python", type=Path)
    options = parser.parse_args()
    streams, turns = (STREAMS[:1], 1) if options.quick else (STREAMS, TURNS)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        folder = f"rollout.server_weights={Path(name) / 'weights'}"
        subprocess.run([*serve.RELIBRA, "export", str(model), *MODEL, folder], check=True, stdout=subprocess.DEVNULL)
        rows = measured_rows(model, options.vllm_python, streams, turns)
    for row in [] if options.json else rows:
        print(f"{row['streams']:>3} streams: {row['tokens_per_second']:,.0f} tokens/s, vLLM {row['vllm']:,.0f}: "
              f"{row['ratio']:.2f} of it, {row['cpu_ratio']:.2f} per CPU second; target {TARGET}")  # fmt: skip
    if options.json:
        print(json.dumps(rows, indent=1))
    if not options.quick:
        print(
            write_results("beside_vllm", rows, "relibra bench beside_vllm VLLM_PYTHON", options.output), file=sys.stderr
        )


def measured_rows(model: Path, vllm_python: Path, streams: tuple[int, ...], turns: int) -> list[dict]:
    """Return a row for each number of streams; both servers run, and while one is asked the other sleeps."""
    flags = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", str(max(streams)))
    log = model.with_name("vllm.log")
    with (
        serve.local_server(model, OWN_FLAGS) as ours,
        local_vllm.local_server(vllm_python, model, log, flags=flags) as theirs,
    ):
        urls = {"relibra": (ours, "model", b"\0serve\0"), "vllm": (theirs, str(model), b"vllm.entrypoints")}
        found = {(server, count): list[tuple[float, float]]() for server in urls for count in streams}
        for turn in range(turns + 1):  # the first warms up
            for count in streams:
                for server, asked in urls.items():
                    rate = asyncio.run(_rates(*asked, count))
                    found[server, count] += [rate] if turn else []
    return [_row(count, found["relibra", count], found["vllm", count]) for count in streams]


def _row(count: int, own: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> dict:
    rate, cpu_rate = (statistics.median(values) for values in zip(*own, strict=True))
    vllm, vllm_cpu = (statistics.median(values) for values in zip(*theirs, strict=True))
    return {
        "case": f"{count} streams", "label": "measured", "unit": UNIT, "seed": 0, "repetitions": len(own),
        "streams": count, "tokens_per_second": rate, "vllm": vllm, "ratio": rate / vllm,
        **quartiles([one / vllm for one, _ in own], "ratio"),
        "per_cpu_second": cpu_rate, "vllm_per_cpu_second": vllm_cpu, "cpu_ratio": cpu_rate / vllm_cpu,
        "configuration": f"6 layers, 4 of 16 experts of 512 x 512, float32; prompts of {PROMPT_TOKENS}, answers of "
        f"{TOKENS} tokens; vLLM in its own environment, defaults but for lengths; relibra serve --experts 1; 2 cores",
    }  # fmt: skip


async def _rates(url: str, model: str, mark: bytes, count: int) -> tuple[float, float]:
    """Return tokens per second, and per CPU second of the processes of the server."""
    body = {"model": model, "max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "stream": True}
    before, start = cpu_seconds(mark), time.perf_counter()
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:

        async def stream(number: int) -> None:
            prompt = [1 + (7 * number + i) % 10 for i in range(PROMPT_TOKENS)]
            request = {**body, "prompt": prompt, "seed": number}
            async with client.stream("POST", f"{url}/v1/completions", json=request) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_raw():
                    pass

        await asyncio.gather(*(stream(number) for number in range(count)))
    wall = time.perf_counter() - start
    return count * TOKENS / wall, count * TOKENS / (cpu_seconds(mark) - before)


def cpu_seconds(mark: bytes) -> float:
    """Return CPU seconds of the child of this process with a mark in its command line, and of all below it."""
    parents, seconds = dict[int, int](), dict[int, float]()
    root = None
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, command = (folder / "stat").read_text().rpartition(")")[2].split(), (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        pid = int(folder.name)
        parents[pid], seconds[pid] = int(words[1]), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        root = pid if parents[pid] == os.getpid() and mark in command else root
    assert root is not None, f"a child has {mark!r} in its command line"

    def total(pid: int) -> float:
        return seconds[pid] + sum(total(child) for child, parent in parents.items() if parent == pid)

    return total(root)


if __name__ == "__main__":
    main()
