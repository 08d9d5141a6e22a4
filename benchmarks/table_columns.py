"""Columns of every table that render.py writes, and how their cells are formatted."""

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.provenance import quartiles

Column = str | tuple[str, Callable[[dict], object]]
"""A key of the rows, or a title and a function of a row."""

FACTS = ("configuration", "sizes", "ranks and experts", "source", "simulated", "cited")
"""Titles of columns whose cells are facts with ", " or "; " between them: those of all rows stand under the table."""


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A table with a line per group of rows.

    by        what the rows of a group share
    figures   one column each; a cell shows the smallest and the largest value of its group
    over      what becomes columns, each with every figure; None: one column per figure
    """

    by: tuple[Column, ...]
    figures: tuple[Column, ...]
    over: Column | None = None


def _of(key: str, title: str = "") -> Column:
    """Return a column that is empty where a row lacks the key."""
    return title or key.replace("_", " "), lambda row: row.get(key, "")


_IN_TURN: tuple[Column, ...] = ("dispatch", ("routes and ranks", lambda row: ", ".join(row["case"].split(", ")[:2])))
_STEP: tuple[Column, ...] = (
    ("static / it", lambda row: row["ratio_to_static"]),
    ("best peer / it", lambda row: row["ratio_to_best_peer"]),
    ("best own setting / it", lambda row: row["ratio_to_best_own_setting"]),
    ("hidden (model): static / it", lambda row: row["hidden_ratio_to_static"]),
    ("hidden (model): best peer / it", lambda row: row["hidden_ratio_to_best_peer"]),
    ("slots", lambda row: row["slots"]),
)
_SHARES: tuple[Column, ...] = (
    ("executor", lambda row: row["executor_ratio"]),
    ("balance", lambda row: row["balance_ratio"]),
)
_BALANCERS: tuple[Column, ...] = (
    "balancer",
    "sees",
    "slots",
    "8 ranks",
    "16 ranks",
    "32 ranks",
    "copies",
    "across nodes",
    "plan ms",
)
_RUNTIME: tuple[Column, ...] = (
    "case",
    "skew",
    "planned_skew",
    ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
    ("quartiles", lambda row: tokens_between(row)),
    ("/ all_to_all", lambda row: row["ratio_to_all_to_all"]),
    *_SHARES,
    ("/ balanced", lambda row: row["ratio_to_balanced"]),
    ("sizes", lambda row: sizes(row["sizes"])),
)
_GOALS: tuple[Column, ...] = (
    *("case", "label", "value", "goal", "unit", "cited"),
    ("configuration", lambda row: row["configuration"].partition("; ")[0]),
)
_EMULATED = Grouped(
    by=("balancer", "sees"),
    over="ep",
    figures=(("in slots, in time", lambda row: f"{row['token_skew']:.2f}, {row['straggler']:.2f}"),),
)
_MINI_BATCHES = {
    "old log-probs of all": "all",
    "old log-probs but of the first mini-batch": "all but the first",
    "no old log-probs": "none",
}
_PASSES: tuple[Column, ...] = (
    ("old log-probs of mini-batches", lambda row: _MINI_BATCHES[row["passes"].partition(", ")[0]]),
    ("activations", lambda row: row["passes"].partition(", activations ")[2]),
)
_KEPT: Column = ("kept", lambda row: re.sub(" of| layers| the", "", row["kept"]).replace("everything", "all"))
_ITERATION: tuple[Column, ...] = (
    ("training s", lambda row: row["seconds"]),
    ("iteration s", lambda row: row["iteration_seconds"]),
    ("GiB", lambda row: f"{row['gib']:.1f}" + ("" if row["fits"] else ", does not fit")),
)
_CITED_RATIOS: Column = (
    "cited / static, / ideal", lambda row: row["cited"].replace(" of static", "").replace(" of ideal", "")
)  # fmt: skip
_RATIOS: tuple[Column, ...] = (
    ("static / it", lambda row: row["ratio_to_static"]),
    ("best balancer / it", lambda row: row["ratio_to_best_peer"]),
    ("best setting of a peer / it", lambda row: row["ratio_to_best_setting"]),
)
COLUMNS: dict[str, tuple[Column, ...] | Grouped] = {
    "recordings": Grouped(by=("case", "configuration"), over="ranks", figures=("mean", "median", "p95")),
    "picked_together": Grouped(
        by=("model", ("scored on", lambda row: "other samples" if "left" not in row["split"] else "a domain"), "homes"),
        over=("copies", lambda row: "no copies" if row["copies"] == "none" else "a copy per rank"),
        figures=("other ranks", "load", ("in a micro-batch", lambda row: row["load in a micro-batch"])),
    ),
    "picked_together_seconds": (
        "case",
        "dispatch",
        "tokens",
        ("planned ms", lambda row: row["planned"]),
        *("there / planned", "moved / planned", "bound / bound"),
    ),
    "routing": ("case", ("million per second", lambda row: row["median"]), "configuration"),
    "route_path": ("case", "us_per_token", "configuration"),
    "route_memory": ("case", "peak_gib", "target", "seconds", "configuration"),
    "route_import": ("case", "gb_per_second", ("goal", lambda row: row["target"] or ""), "peak_mib", "configuration"),
    "streaming": ("case", "seconds", "gb_per_second", "peak_mib", "configuration"),
    "balancers_gpt_oss": _BALANCERS,
    "balancers_v2_lite": _BALANCERS,
    "planner": ("case", "ranks", "reached", "target", "bound", "unit", "configuration"),
    "planner/skew": Grouped(by=("case",), over="ranks", figures=("reached",)),
    "planner_whole_step": Grouped(
        by=("layers", "micro_batches", "ranks_and_experts"),
        over=("step", lambda row: row["case"].split(", ", 2)[2]),
        figures=(
            (
                "seconds, peak memory, experts that move",
                lambda row: f"{row['seconds']} s, {row['peak_mib']:,} MiB, {row['moved']:.0%}",
            ),
        ),
    ),
    "trainer_schedules": Grouped(
        by=("case",),
        over="trainer",
        figures=(("skew, planned", lambda row: f"{row['skew']:.3f}, {row['planned_skew']:.3f}"),),
    ),
    "step/default": Grouped(by=("dispatch", ("routes", lambda row: row["case"].split(", ")[0])), figures=_STEP),
    "step/unseen": Grouped(by=_IN_TURN, figures=_STEP),
    "step/lost": ("case", *_STEP),
    "step/ahead": Grouped(by=("dispatch", "plan"), figures=(("default / it - 1", lambda row: row["ahead"]),)),
    "step/order": ("case", "share", "target", "pairs"),
    "iteration/default": Grouped(
        by=("dispatch", "mini_batches", ("prompt / response", lambda row: row["lengths"])),
        figures=(*_RATIOS, ("best that repeats prompts / it", lambda row: row["ratio_to_best_repeating_setting"])),
    ),
    "iteration/levers": Grouped(by=(*_PASSES, "ahead"), over="prompts", figures=(_KEPT, *_ITERATION, _RATIOS[-1])),
    "iteration/peers": (
        ("peer", lambda row: row["plan"]),
        _PASSES[0],
        ("setting", lambda row: row["words"]),
        "balancer",
        _KEPT,
        *_ITERATION,
        ("it / relibra, equal passes", lambda row: row["ratio_to_relibra"]),
        "source",
    ),
    "iteration/equal": Grouped(
        by=(("passes of old log-probs", lambda row: row["passes"].partition(", ")[0]), "setting", "prompts"),
        over="dispatch",
        figures=(("peer / relibra", lambda row: row["ratio_to_relibra"]),),
    ),
    "lasting": Grouped(
        by=(("routes", lambda row: row["case"].split(", ")[0]),),
        figures=(
            ("median of a cell", lambda row: row["ratio_median"]),
            ("worst of a cell", lambda row: row["ratio_worst"]),
            ("static / lasting", lambda row: row["ratio_to_static"]),
        ),
    ),
    "runtime": _RUNTIME,
    "runtime/peers": Grouped(
        by=("case", ("skew", lambda row: row["case_skew"])), over="balancer", figures=("ratio_to_all_to_all",)
    ),
    "runtime_targets": (
        "case",
        "what",
        "reached",
        ("target", lambda row: f"{'<=' if row['at_most'] else '>='} {shown(row['target'])}"),
    ),
    "runtime_ranks": ("balancer", "ep", *_RUNTIME),
    "memory": (
        "case",
        *(
            (phase, lambda row, phase=phase: row.get(f"{phase} GiB", "-"))
            for phase in ("recompute", "update", "optimizer")
        ),
        ("largest difference", lambda row: f"{row['largest difference']:.1%}"),
        "at_most",
    ),
    "training": (
        "case",
        "layers",
        ("GPUs", lambda row: row["ranks"]),
        ("s / step", lambda row: row["seconds"]),
        ("tokens/s, GPU", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("update alone", lambda row: f"{row['update_tokens_per_second']:,.0f}"),
        ("GiB", lambda row: f"{row['gib']:.1f}"),
        ("estimated", lambda row: f"{row['estimated_gib']:.1f}" if "estimated_gib" in row else "-"),
        ("GPU", lambda row: re.sub("NVIDIA | HBM3", "", row["configuration"].split(", ")[0].partition(" x ")[2])),
        ("micro-batches", lambda row: re.sub(" micro-batches| per GPU", "", row["configuration"].split(", ", 2)[2])),
    ),
    "preparation": Grouped(
        by=(("case", lambda row: ", ".join(filter(None, (row["case"], _sizes_and_routes(row)[1])))),),
        over=("sizes", lambda row: _sizes_and_routes(row)[0]),
        figures=(
            (
                "value",
                lambda row: (
                    f"{shown(row['value'])} {row['unit']}" + f" (target {row.get('target')})" * bool(row.get("target"))
                ),
            ),
        ),
    ),
    "dispatch": (
        ("dispatch", lambda row: row["case"]),
        ("MiB between nodes, planned", lambda row: f"{row['planned_bytes'] / 2**20:.3f}"),
        ("sent", lambda row: f"{row['sent_bytes'] / 2**20:.3f}"),
        "seconds",
        "configuration",
    ),
    "emulated_ranks": _EMULATED,
    "gpu": _EMULATED,
    "gpu_overlap": ("case", "copy ms", "compute ms", "together ms", "hidden", "configuration"),
    "gpu_executor": (
        "case",
        "token_skew",
        "straggler",
        ("off", lambda row: f"{row['off']:+.1%}"),
        ("target", lambda row: f"<= {row['target']:.0%}"),
        ("ok", lambda row: "yes" if row["ok"] else "NO"),
        *("prepare ms", "gather ms", "product ms", "one product ms", "join ms", "combine ms", "layer ms"),
        *("push ms", "exposed ms", "layer / static", "configuration"),
    ),
    "rl": (
        "case",
        "steps",
        ("s / step", lambda row: row["step_seconds"]),
        ("quartiles", lambda row: between(row, "step_seconds")),
        ("/ static", lambda row: row["ratio_to_static"]),
        ("train / static", lambda row: row["ratio_train"]),
        ("value model / static", lambda row: row["ratio_values"] or "-"),
        *_SHARES,
        ("expert share", lambda row: f"{row['expert_share']:.0%}"),
        ("plan %", lambda row: f"{100 * row['plan_share']:.1f}"),
        ("skew", lambda row: row["rank_skew"]),
        "planned_skew",
        ("reward", lambda row: f"{row['reward_first']:.3f}, {row['reward_last']:.3f}"),
        "configuration",
    ),
    "demo": (
        "seed",
        "reward_first",
        "reward_last",
        "seconds",
        "rl_seconds_per_step",
        "k3_max",
        "configuration",
    ),
    "tppo": Grouped(
        by=("algorithm",),
        figures=(
            "updates",
            "decode_steps",
            ("seconds", lambda row: row["wall_seconds"]),
            ("PPO / decode steps", lambda row: row["decode_ratio"]),
            ("PPO / seconds", lambda row: row["wall_ratio"]),
            _of("queued_ratio", "queued / seconds"),
            ("idle", lambda row: row["idle_share"]),
            "fed_again",
            _of("mixed_share"),
            _of("rows_per_token"),
            "final_reward",
        ),
    ),
    "tppo_toy": (
        "targets",
        "setting",
        "updates",
        ("/ sync", lambda row: row["updates / sync"]),
        "decode_steps",
        ("/ sync", lambda row: row["decode_steps / sync"]),
        "idle",
        ("solved", lambda row: f"{row['solved']} of {row['repetitions']}"),
        "configuration",
    ),
    "rollout_windows": (
        "median",
        "sigma",
        "window",
        ("idle, sync", lambda row: row["idle sync"]),
        ("idle, window", lambda row: row["idle window"]),
        "rate, b = 0",
        "rate, b = 1/512",
        "fed again",
        "configuration",
    ),
    "rollout_windows/step": (
        "median",
        "sigma",
        "window",
        _of("rollout, fed again"),
        _of("rollout, kept"),
        _of("step, fed again"),
        _of("step, kept"),
        _of("cited"),
    ),
    "papers/throughput": Grouped(
        by=("model", "ranks", "load"),
        over="balancer",
        figures=(("simulated / static", lambda row: row["ratio_to_static"]),),
    ),
    "papers/missed": (
        "model",
        "ranks",
        "load",
        "balancer",
        ("simulated / static", lambda row: row["ratio_to_static"]),
        ("simulated / Balanced", lambda row: row["ratio_to_balanced"]),
        ("against Balanced, in % of its step", lambda row: row["why"].partition("of its step: ")[2] or row["why"]),
    ),
    "papers/ablation": (
        ("simulated", lambda row: row["case"]),
        ("/ static", lambda row: row["ratio_to_static"]),
        ("/ Balanced", lambda row: row["ratio_to_balanced"]),
        "skew",
        "cited",
    ),
    "papers/skew": Grouped(by=("balancer", "cited"), over="ranks", figures=(("skew", lambda row: row["skew"]),)),
    "papers/planner": ("case", ("skew, model", lambda row: row["skew"]), ("copies", lambda row: row["value"]), "cited"),
    "papers/training": Grouped(
        by=("balancer",), over="model", figures=(("simulated", lambda row: row["ratio_to_static"]), _CITED_RATIOS)
    ),
    "papers/straggler": Grouped(by=("balancer",), over="ranks", figures=(("model", lambda row: row["value"]), "cited")),
    "papers/iteration": (
        ("simulated", lambda row: row["case"]),
        "recompute",
        "update",
        "end_to_end",
        ("/ Balanced", lambda row: row["ratio_to_balanced"]),
        "cited",
    ),
    "serving": (
        "case",
        "ratio",
        _of("ratio_p99", "ratio of p99"),
        ("target", lambda row: row["target"] or ""),
        ("p50 ms", lambda row: row["p50_ms"]),
        ("p99 ms", lambda row: row["p99_ms"]),
        _of("tokens_per_second"),
    ),
    "shared_prompts": (
        "case",
        "plan",
        "slots",
        "tokens",
        _of("seconds", "recompute + update s"),
        _of("ratio", "repeated / it"),
        "target",
        "skew",
    ),
    "ahead": (
        "case",
        ("tokens / s", lambda row: round(row["tokens_per_second"])),
        ("ahead / waiting", lambda row: row["ratio"]),
        _of("target"),
        ("rollout %", lambda row: f"{100 * row['rollout_share']:.0f}"),
        ("plan %", lambda row: f"{100 * row['plan_share']:.2f}"),
        "reward",
        ("age", lambda row: row["age_mean"]),
        ("mixed %", lambda row: f"{100 * row['mixed_share']:.1f}"),
    ),
    "trl": (
        "case",
        ("relibra, CPU s per step", lambda row: row["seconds"]),
        ("TRL", lambda row: row["trl_seconds"]),
        ("relibra / TRL", lambda row: row["ratio"]),
        ("quartiles of pairs", lambda row: between(row, "ratio")),
        ("MiB", lambda row: round(row["mib"])),
        ("TRL, MiB", lambda row: round(row["trl_mib"])),
        ("memory, relibra / TRL", lambda row: row["memory_ratio"]),
        ("goals", lambda row: row["target"]),
        ("reached", lambda row: "yes" if row["ok"] else "NO"),
    ),
    "trl/stages": (
        "case",
        *(
            (stage, lambda row, stage=stage: row["stages"].get(stage, 0.0))
            for stage in ("rollout", "plan", "recompute", "update", "sync")
        ),
    ),
    "beside_vllm": (
        "case",
        _of("tokens_per_second"),
        "vllm",
        _of("ratio", "of vLLM"),
        _of("cpu_ratio", "of vLLM, per CPU second"),
    ),
    "acceptance": _GOALS,
    "deployment": _GOALS,
    "deployment/gain": Grouped(by=("case",), over="per", figures=(("simulated, per", lambda row: row["value"]),)),
    "deployment/pairs": (
        "case",
        ("model: tokens/s per price", lambda row: round(row["value"])),
        ("per GPU", lambda row: round(row["per_gpu"])),
        "nodes",
        ("micro-batches", lambda row: row["micro_batches"]),
        ("ms per token", lambda row: round(row["ms"], 1)),
        "gpus",
        "limit",
    ),
    "validation": (
        ("skew", lambda row: row["case_skew"]),
        "balancer",
        ("measured s", lambda row: row["measured_seconds"]),
        ("simulated s", lambda row: row["simulated_seconds"]),
        ("error %", lambda row: f"{100 * row['error']:+.1f}"),
        "ranking",
    ),
    "simulation": ("case", "seconds", "target", "peak_mib", "configuration"),
    "reliability/signals": (
        "case",
        "points",
        ("while it starts", lambda row: row["starting"]),
        "equal",
        "anew",
        ("named", lambda row: f"{row['named']} of {row['hit one rank']}"),
        ("failed", lambda row: row["neither"]),
        ("s until told", lambda row: or_never(row["told seconds"])),
        ("most s until the end", lambda row: or_never(row["ended max"])),
        "configuration",
    ),
    "reliability/disks": (
        *("disks", "went on"),
        ("without routes or TensorBoard", lambda row: row["warned"]),
        "stopped",
        ("with a sentence", lambda row: row["sentence"]),
        *("anew", "equal", ("failed", lambda row: row["neither"]), "configuration"),
    ),
    "reliability/attack": Grouped(
        by=(("case", lambda row: attack(row["case"])), ("status", lambda row: row["status"] or ""), "configuration"),
        figures=(
            ("seconds", lambda row: round(row["seconds"], 1)),
            ("others held, ms", lambda row: round(row["held ms"] or 0) or ""),
            ("peak MiB", lambda row: round(row["peak MiB"] or 0) or ""),
            ("s until told", lambda row: round(row["told seconds"], 1) if row["told seconds"] else ""),
            ("failed", lambda row: row["neither"]),
        ),
    ),
}
"""Columns per table: FILE, or FILE/VIEW where a file has several views."""


def _sizes_and_routes(row: dict) -> tuple[str, str]:
    """Return the sizes of a model and its batches, and which routes are known, of a row of preparation.py."""
    sizes, known, routes = row["configuration"].partition(" micro-batches, ")
    return sizes + known.rstrip(", "), routes


def sizes(of: dict) -> str:
    """Format the sizes of a model and of its batches, as runtime.py writes them."""
    return (
        f"{of['layers']} layers, {of['top_k']} of {of['experts']} experts of {of['hidden']} x {of['width']}, "
        f"{of['micro_batches']} micro-batches of {of['samples']} x {of['length']:,} tokens per rank, 1 thread per rank"
    )


def between(row: dict, key: str) -> str:
    """Format the quartiles of a figure; an empty string where a row has none."""
    ends = [row[name] for name in (f"{key} low", f"{key} high") if name in row]
    return " to ".join(map(shown, ends))


def tokens_between(row: dict) -> str:
    """Format the quartiles of the throughput, computed from the seconds of each repetition."""
    total = row["tokens_per_second"] * statistics.median(row["seconds"])
    rates = quartiles([total / seconds for seconds in row["seconds"]], "rate")
    return " to ".join(f"{rate:,.0f}" for rate in rates.values())


def attack(case: str) -> str:
    """Return what the cases of `relibra bench reliability attack` have in common: a signal, or how many bodies."""
    if case.startswith("SIG"):
        return "SIGSTOP of a worker" if "STOP" in case else "SIGINT under load"
    return case if case[0].isdigit() else "one hostile body"


def or_never(value: float | None) -> object:
    """Return "never" in place of None."""
    return "never" if value is None else value


def shown(value: object) -> str:
    """Format one cell: three decimals, or powers of ten for what would be 0 with them."""
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)
