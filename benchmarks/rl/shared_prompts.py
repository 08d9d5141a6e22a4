"""Recompute and update of a step with the prompt of a group once, and with each response: two processes, plans, replay.

Prompts are a quarter of the tokens where each response repeats its own, and a micro-batch holds eight responses or
more. Routes are made up, uneven, and the same for both; the two take turns. By default plans of the two may differ:
one moves homes and exchanges rows, the other copies all experts. With homes kept both copy all. Rows go to
results/shared_prompts.json.
Run: relibra bench shared_prompts [--quick] [--json] [--output FOLDER]. Six minutes.
--quick takes a small model and one turn, and writes no rows.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from relibra.cluster import cluster_preset
from relibra.parallel import relocate
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.batch.training_batch import build_batch, current_homes, executing
from relibra.rl.config.run_config import load_config
from relibra.rl.model.optimizer import StepCount, make_optimizer
from relibra.rl.model.policy import build_policy
from relibra.rl.rollout.response import Response, Window, new_response
from relibra.rl.run.ranks import joined_ranks
from relibra.rl.update.policy_update import update_policy
from relibra.rl.update.recompute import recompute

RANKS, GROUPS, RESPONSES, PROMPT, RESPONSE, VOCABULARY = 2, 4, 16, 128, 384, 64
LAYERS, EXPERTS, TOP_K, SKEW = 3, 16, 4, 0.8
SETTINGS = (
    f"parallel.ranks={RANKS}",
    f"model.num_layers={LAYERS}",
    "model.hidden_size=256",
    f"model.num_experts={EXPERTS}",
    f"model.experts_per_token={TOP_K}",
    "model.dtype=float32",
    "algorithm.preset=grpo",
    "update.micro_batch_tokens=4096",
    "update.mini_batches=1",
    "rollout.max_response=1024",
)
WIDTH, TURNS, TARGET = 1024, 4, 1.2
"""Of an expert; turns, of which the first compiles and is not counted; seconds repeated / seconds once."""
CASES = {"prompts once": True, "prompts repeated": False}
PLANS = {"default": (), "homes kept": ("plan.move_homes=false",)}


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    width, turns = (32, 2) if options.quick else (WIDTH, TURNS)
    rows = []
    for plan, changed in PLANS.items():
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            probe.close()
            spawn(_work, (width, turns, port, Path(folder), changed), nprocs=RANKS)
            found = json.loads((Path(folder) / "found.json").read_text())
        rows += [{"plan": plan, **_row(case, found, width)} for case in CASES]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(", ".join(f"{name} {row[name]}" for name in ("case", "plan", "tokens", "seconds", "ratio", "skew")))
    if not options.quick:
        print(write_results("shared_prompts", rows, "relibra bench shared_prompts", options.output), file=sys.stderr)


def _work(rank: int, width: int, turns: int, port: int, folder: Path, changed: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config, device = load_config(None, [*SETTINGS, *changed, f"model.expert_width={width}"]), torch.device("cpu")
    cluster, loss = cluster_preset("laptop", RANKS), find_loss(config)
    with joined_ranks(600.0, device):
        policy = build_policy(config, VOCABULARY, folder, device, samples=False)
        assert policy.shares_prompts, "the built-in model attends in sequences of its own"
        optimizer = make_optimizer(policy.trained, config.update.learning_rate, config.update)
        found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for turn in range(turns):
            for case in list(CASES)[:: 1 if turn % 2 else -1]:
                own = replace(policy, shares_prompts=CASES[case])
                previous = current_homes(policy, cluster.topology)
                batch = build_batch(_responses(rank), own, config, previous=previous, cluster=cluster)
                assert batch.plan is not None, "routes are known"
                assert batch.demand is not None, "routes are known"
                relocate(policy.trained, batch.plan.physical_to_logical_map, optimizer)
                dist.barrier()
                start = time.perf_counter()
                with executing(own, batch, config.plan, cluster) as context:
                    scores = recompute(policy.trained, batch, context, config.algorithm, temperature=1.0)
                ones = [torch.ones(len(one.row_X)) for one in batch.micro_batches]
                trained = batch.filled(
                    old_log_probs_X=scores.log_probs,
                    advantages_X=ones,
                    loss_mask_X=[one > 0 for one in ones],
                    positive_B=[torch.ones(one.num_responses) > 0 for one in batch.micro_batches],
                )
                with executing(own, trained, config.plan, cluster) as context:
                    update_policy(
                        policy.trained, optimizer, trained, context, loss, config.update, count=StepCount(),
                        num_ranks=RANKS,
                    )  # fmt: skip
                dist.barrier()
                seconds = time.perf_counter() - start
                counts = torch.tensor([sum(one.tokens_1T.numel() for one in batch.micro_batches)])
                dist.all_reduce(counts)
                skew, slots = batch.plan.skew(batch.plan.scheduled(batch.demand)), batch.plan.replica_MLRB.shape[3]
                least = min(one.num_responses for one in batch.micro_batches)
                found[case].append(
                    {"seconds": seconds, "tokens": int(counts), "skew": skew, "responses": least, "slots": slots}
                )
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found))


def _responses(rank: int) -> list[Response]:
    """Return the responses of a rank, with uneven routes; those of a group recorded its prompt alike."""
    rng, found = np.random.default_rng(0), list[Response]()
    weight_LE = np.exp(SKEW * rng.normal(size=(LAYERS, EXPERTS)))

    def routes(rows: int) -> np.ndarray:
        keys = rng.standard_exponential((rows, LAYERS, EXPERTS)) / weight_LE
        return keys.argsort(-1)[..., :TOP_K].astype(np.uint8)

    for group in range(GROUPS):
        prompt, of_prompt = rng.integers(3, VOCABULARY, PROMPT).tolist(), routes(PROMPT)
        for s in range(RESPONSES):
            length = int(rng.integers(RESPONSE // 2, RESPONSE * 3 // 2))
            window = Window(
                tokens_w=rng.integers(3, VOCABULARY, length),
                log_probs_w=np.full(length, -4.0, np.float32),
                experts_mLK=np.concatenate([of_prompt, routes(length - 1)]),
                stopped=True,
            )
            begun = new_response(group * RESPONSES + s, group, prompt)
            found.append(replace(begun.extended(window, weight_version=0, max_response=1024), reward=float(s % 2)))
    return found[rank::RANKS]


def _row(case: str, found: dict[str, list[dict[str, float]]], width: int) -> dict:
    taken = {name: [one["seconds"] for one in turns[1:]] for name, turns in found.items()}
    median, last = {name: float(np.median(seconds)) for name, seconds in taken.items()}, found[case][-1]
    ratio = median["prompts repeated"] / median[case]
    once = CASES[case]
    return {
        "case": case,
        "label": "measured",
        "unit": "seconds of recompute and update of a step, medians; ratio: of repeated prompts to the row's",
        "tokens": last["tokens"],
        "seconds": round(median[case], 2),
        **quartiles(taken[case], "seconds"),
        "ratio": round(ratio, 3),
        "target": f">= {TARGET}" if once else "",
        "ok": ratio >= TARGET if once else "",
        "responses": last["responses"],
        "skew": round(last["skew"], 3),
        "slots": last["slots"],
        "seed": 0,
        "repetitions": len(taken[case]),
        "configuration": f"{GROUPS} groups of {RESPONSES}, prompts of {PROMPT} and responses of {RESPONSE} tokens on "
        f"average, {LAYERS} layers, hidden 256, {TOP_K} of {EXPERTS} experts of width {width}, R3 with plans, "
        f"{RANKS} processes of one thread, float32; responses: fewest of a micro-batch; slots: for copies, of a rank",
    }


if __name__ == "__main__":
    main()
