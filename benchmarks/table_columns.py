"""Columns of every table that render.py writes, and how their cells are formatted."""

import statistics
from collections.abc import Callable

from benchmarks.harness.provenance import quartiles

Column = str | tuple[str, Callable[[dict], object]]
"""A key of the rows, or a title and a function of a row."""

_OF_RANKS: tuple[Column, ...] = (
    "ep",
    "balancer",
    "sees",
    "token_skew",
    "straggler",
    "straggler / token skew",
    "busiest ms",
    ("quartiles", lambda row: between(row, "busiest ms")),
    "time / static",
    "time / equal",
    "configuration",
)
_VALUES: tuple[Column, ...] = ("case", ("simulated", lambda row: row["value"]), "cited")
_MODELLED: tuple[Column, ...] = ("case", ("model", lambda row: row["value"]), "cited")
_STEP_BYTES = ("row_bytes", "weight_bytes", "gradient_bytes", "move_bytes")
_STEP: tuple[Column, ...] = (
    "case",
    "seconds",
    ("with all moves", lambda row: row["seconds_in_full"]),
    ("static / it", lambda row: row["ratio_to_static"]),
    ("best peer / it", lambda row: row["ratio_to_best_peer"]),
    ("best own setting / it", lambda row: row["ratio_to_best_own_setting"]),
    ("exchange hidden: static / it", lambda row: row["hidden_ratio_to_static"]),
    ("best peer / it", lambda row: row["hidden_ratio_to_best_peer"]),
    "skew",
    ("GB of rows, weights, gradients, moves", lambda row: ", ".join(f"{row[kind] / 1e9:,.1f}" for kind in _STEP_BYTES)),
    ("exposed s", lambda row: row["exposed_seconds"]),
    (
        "slots, of a layer, GiB",
        lambda row: f"{row['slots']}, {'yes' if row['resident'] else 'no'}, {row['slot_gib']:.1f}",
    ),
    "moved",
    ("plan s", lambda row: row["plan_seconds"]),
    "configuration",
)
_SHARES: tuple[Column, ...] = (
    ("executor", lambda row: row["executor_ratio"]),
    ("balance", lambda row: row["balance_ratio"]),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "recordings": ("case", "ranks", "mean", "median", "p95", "configuration"),
    "streaming": (
        "case",
        "million_rows",
        "seconds",
        ("quartiles", lambda row: between(row, "seconds")),
        "gb_per_second",
        "peak_mib",
        "configuration",
    ),
    "route_import": (
        "case",
        "gigabytes",
        "gb_per_second",
        ("quartiles", lambda row: between(row, "gb_per_second")),
        "target",
        "peak_mib",
        "configuration",
    ),
    "routing": ("case", "median", "min", "max", "configuration"),
    "route_memory": ("case", "peak_gib", "target", "seconds", "gigabytes", "configuration"),
    "serving": (
        "case",
        "ratio",
        ("ratio of p99", lambda row: row.get("ratio_p99", "")),
        ("target", lambda row: row["target"] or ""),
        ("p50 ms", lambda row: row["p50_ms"]),
        ("p99 ms", lambda row: row["p99_ms"]),
        ("tokens per second", lambda row: row.get("tokens_per_second", "")),
        ("baseline", lambda row: row.get("baseline_p50_ms", row.get("baseline_tokens_per_second", ""))),
        "configuration",
    ),
    "route_path": ("case", "us_per_token", ("quartiles", lambda row: between(row, "us_per_token")), "configuration"),
    "balancers_gpt_oss": (
        _BALANCERS := (
            "balancer",
            "sees",
            "slots",
            "8 ranks",
            "16 ranks",
            "32 ranks",
            "copies",
            "across nodes",
            "plan ms",
            ("quartiles", lambda row: between(row, "plan ms")),
        )
    ),
    "balancers_v2_lite": _BALANCERS,
    "planner": (
        "case",
        "ranks",
        "reached",
        ("quartiles", lambda row: between(row, "reached")),
        "target",
        "ok",
        "bound",
        "copies",
        "unit",
        "configuration",
    ),
    "trainer_schedules": (
        "case",
        "trainer",
        "skew",
        "planned_skew",
        ("no schedule below", lambda row: row["lowest_skew"]),
        ("skew / planned", lambda row: row["ratio"]),
        "attention_skew",
        "planned_attention_skew",
        ("fullest rank", lambda row: f"{row['max_rank_tokens']:,} of {row['token_limit']:,}"),
        "seconds",
        "configuration",
    ),
    "planner_model": ("case", "ranks", "static", "plan", "ratio", "configuration"),
    "planner_growth": (
        "layers",
        "micro_batches",
        "ranks",
        "experts",
        "seconds",
        ("quartiles", lambda row: between(row, "seconds")),
        "ms_each",
        "configuration",
    ),
    **dict.fromkeys(("step_default", "step_lost", "step_unseen"), _STEP),
    "step_ahead": ("case", "plan", "seconds", ("default / it - 1", lambda row: f"{row['ahead']:.1%}"), *_STEP[-6:]),
    "step_order": ("case", "share", "target", "pairs", "configuration"),
    "runtime": (
        "case",
        "balancer",
        "skew",
        "planned_skew",
        ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("quartiles", lambda row: tokens_between(row)),
        ("/ all_to_all", lambda row: row["ratio_to_all_to_all"]),
        *_SHARES,
        ("/ balanced", lambda row: row["ratio_to_balanced"]),
        ("exposed %", lambda row: f"{100 * row['exposed_share']:.1f}"),
        ("peak MiB", lambda row: f"{row['peak_bytes'] / 2**20:,.0f}"),
        ("slot MiB", lambda row: f"{row['slot_bytes'] / 2**20:,.1f}"),
        ("pushes", lambda row: f"{row['pushes']:.2f}" if "pushes" in row else "-"),
        ("pushed MiB", lambda row: f"{row['bytes_pushed'] / 2**20:,.1f}" if "bytes_pushed" in row else "-"),
        ("relocation s", lambda row: row["relocation_seconds"]),
        ("configuration", lambda row: sizes(row["sizes"])),
    ),
    "runtime_targets": (
        "case",
        "what",
        "reached",
        ("target", lambda row: f"{'<=' if row['at_most'] else '>='} {shown(row['target'])}"),
        ("ok", lambda row: "yes" if row["ok"] else "NO"),
    ),
    "emulated_ranks": _OF_RANKS,
    "preparation": (
        "case",
        "value",
        ("quartiles", lambda row: between(row, "value")),
        "unit",
        ("target", lambda row: row.get("target", "")),
        ("ok", lambda row: row.get("ok", "")),
        "configuration",
    ),
    "dispatch": (
        ("dispatch", lambda row: row["case"]),
        ("MiB between nodes, planned", lambda row: f"{row['planned_bytes'] / 2**20:.3f}"),
        ("sent", lambda row: f"{row['sent_bytes'] / 2**20:.3f}"),
        ("as planned", lambda row: "yes" if row["ok"] else "NO"),
        "seconds",
        ("quartiles", lambda row: between(row, "seconds")),
        "configuration",
    ),
    "gpu": _OF_RANKS,
    "gpu_overlap": (
        "case",
        "copy ms",
        "compute ms",
        "together ms",
        ("quartiles", lambda row: between(row, "together ms")),
        "hidden",
        "configuration",
    ),
    "gpu_executor": (
        "case",
        "token_skew",
        "straggler",
        ("off", lambda row: f"{row['off']:+.1%}"),
        ("target", lambda row: f"<= {row['target']:.0%}"),
        ("ok", lambda row: "yes" if row["ok"] else "NO"),
        *("prepare ms", "gather ms", "product ms", "one product ms", "join ms", "combine ms", "layer ms"),
        ("quartiles", lambda row: between(row, "layer ms")),
        *("push ms", "exposed ms", "layer / static", "configuration"),
    ),
    "runtime_ranks": (
        "case",
        "balancer",
        "ep",
        "skew",
        "planned_skew",
        ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("quartiles", lambda row: tokens_between(row)),
        ("/ all_to_all", lambda row: row["ratio_to_all_to_all"]),
        *_SHARES,
        ("/ balanced", lambda row: row["ratio_to_balanced"]),
        ("peak MiB", lambda row: f"{row['peak_bytes'] / 2**20:,.0f}"),
        ("pushes", lambda row: f"{row['pushes']:.2f}"),
        ("sizes", lambda row: sizes(row["sizes"])),
        "configuration",
    ),
    "planner_whole_step": (
        "ranks_and_experts",
        "case",
        ("s", lambda row: row["seconds"]),
        ("CPU s", lambda row: row["cpu_seconds"]),
        ("ms per layer and micro-batch", lambda row: row["ms_each"]),
        ("peak MiB", lambda row: f"{row['peak_mib']:,}"),
        ("moved", lambda row: f"{row['moved']:.0%}"),
        "resident_slots",
    ),
    "lasting": (
        "case",
        ("median ratio", lambda row: row["ratio_median"]),
        ("worst ratio", lambda row: row["ratio_worst"]),
        ("static / lasting", lambda row: row["ratio_to_static"]),
        ("slots", lambda row: row.get("slots", "-")),
        "configuration",
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
        ("rollout s", lambda row: row["seconds_per_stage"]["rollout"]),
        ("recompute s", lambda row: row["seconds_per_stage"]["recompute"]),
        ("update s", lambda row: row["seconds_per_stage"]["update"]),
        ("relocate s", lambda row: row["seconds_per_stage"].get("relocate", 0.0)),
        ("plan %", lambda row: f"{100 * row['plan_share']:.1f}"),
        ("skew", lambda row: row["rank_skew"]),
        "planned_skew",
        "reward_first",
        "reward_last",
        "configuration",
    ),
    "tppo": (
        "algorithm",
        "seed",
        ("updates", lambda row: or_never(row["updates"])),
        ("decode steps", lambda row: or_never(row["decode_steps"])),
        ("passes", lambda row: or_never(row.get("passes", "-"))),
        ("seconds", lambda row: or_never(row["wall_seconds"])),
        ("PPO / updates", lambda row: or_never(row["updates_ratio"])),
        ("PPO / decode steps", lambda row: or_never(row["decode_ratio"])),
        ("PPO / passes", lambda row: or_never(row.get("passes_ratio", "-"))),
        ("PPO / seconds", lambda row: or_never(row["wall_ratio"])),
        ("idle", lambda row: row["idle_share"]),
        ("unfinished", lambda row: row["unfinished_share"]),
        ("fed again", lambda row: row["fed_again"]),
        ("rollout us / token", lambda row: row["rollout_us"]),
        ("other us / token", lambda row: row["training_us"]),
        "first_reward",
        "final_reward",
        ("to reach", lambda row: row["target"]),
        "configuration",
    ),
    "tppo_toy": (
        "targets",
        "setting",
        "updates",
        ("quartiles", lambda row: between(row, "updates")),
        ("/ sync", lambda row: row["updates / sync"]),
        "decode_steps",
        ("/ sync", lambda row: row["decode_steps / sync"]),
        "idle",
        "continued",
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
        ("rate, b = 1/512", lambda row: row["rate, b = 1/512"]),
        "continued",
        "fed again",
        "configuration",
    ),
    "papers_throughput": (
        "model",
        "ranks",
        "load",
        "balancer",
        ("simulated / static", lambda row: row["ratio_to_static"]),
        ("seeds", lambda row: between(row, "ratio_to_static")),
        ("simulated / Balanced", lambda row: row["ratio_to_balanced"]),
        ("simulated relibra / it", lambda row: row["relibra_over_it"]),
        ("skew", lambda row: row["skew"]),
        "cited",
        ("goal", lambda row: row["ok"]),
        "why",
    ),
    "papers_ablation": (
        *(
            _RATIOS := (
                "case",
                ("simulated / static", lambda row: row["ratio_to_static"]),
                ("simulated / Balanced", lambda row: row["ratio_to_balanced"]),
                "skew",
            )
        ),
        "cited",
        "why",
    ),
    "papers_skew": ("case", "skew", "cited", "why"),
    "papers_cost": (*_VALUES, "unit", "why"),
    "papers_memory": (*_MODELLED, "unit", "why"),
    "papers_planner": ("case", "skew", *_MODELLED[1:], "unit", "why"),
    "papers_training": (*_RATIOS, "cited", "load", "why"),
    "papers_straggler": (*_MODELLED, "skew", "unit", "why"),
    "papers_iteration": (
        *_RATIOS,
        "recompute",
        "update",
        "end_to_end",
        ("rollout share of static", lambda row: row["rollout_share"]),
        "cited",
        "why",
    ),
    "papers_needed": (*_MODELLED, "end_to_end", "unit"),
    "papers_windows": (
        "case",
        ("b = 0", lambda row: row["value"]),
        ("b = 1/512", lambda row: row["slow_decoder"]),
        "fed_again",
        "cited",
        "why",
    ),
    "acceptance_tests": (
        "test",
        "case",
        ("measured", lambda row: row["value"]),
        "goal",
        "ok",
        "unit",
        "cited",
        "configuration",
    ),
    "acceptance_exchange": (
        "case",
        ("gloo / channels", lambda row: row["value"]),
        ("of p99", lambda row: row["ratio_p99"]),
        "p50_ms",
        "p99_ms",
        "gb_per_second",
        ("calls", lambda row: row["repetitions"]),
    ),
    "deployment_acceptance": (
        "test",
        "case",
        ("simulated", lambda row: row["value"]),
        "goal",
        "ok",
        "cited",
        "configuration",
    ),
    "deployment_searched": (
        "test",
        "case",
        ("model", lambda row: row["value"]),
        "goal",
        "ok",
        "cited",
        "configuration",
    ),
    "deployment_measured": ("test", "case", ("measured", lambda row: row["value"]), "goal", "ok", "unit"),
    "deployment_colocated": (
        "case",
        ("simulated ratio", lambda row: row["value"]),
        ("first", lambda row: row["apart"]),
        ("second", lambda row: row["colocated"]),
        ("GPUs", lambda row: f"{row['apart_gpus']} / {row['colocated_gpus']}"),
        "cited",
        "configuration",
    ),
    "deployment_gain": ("case", "per", ("simulated", lambda row: row["value"]), "advice", "configuration"),
    "deployment_pairs": (
        "case",
        "rank",
        ("model: tokens/s per price", lambda row: round(row["value"])),
        ("per GPU", lambda row: round(row["per_gpu"])),
        "nodes",
        ("m", lambda row: row["micro_batches"]),
        ("requests", lambda row: row["rows"]),
        ("rows per expert", lambda row: row["expert_rows"]),
        ("us attention / experts / hop", lambda row: _micros(row)),
        ("ms per token", lambda row: round(row["ms"], 1)),
        "gpus",
        "limit",
    ),
    "validation": (
        ("skew", lambda row: row["case_skew"]),
        "balancer",
        ("measured s", lambda row: row["measured_seconds"]),
        ("quartiles", lambda row: between(row, "measured_seconds")),
        ("simulated s", lambda row: row["simulated_seconds"]),
        ("error %", lambda row: f"{100 * row['error']:+.1f}"),
        ("without rest %", lambda row: f"{100 * row['error_without_rest']:+.1f}"),
        "ranking",
    ),
    "reliability_signals": (
        "case",
        "points",
        ("while it starts", lambda row: row["starting"]),
        "equal",
        "anew",
        ("named", lambda row: f"{row['named']} of {row['hit one rank']}"),
        ("failed", lambda row: row["neither"]),
        ("s until told", lambda row: or_never(row["told seconds"])),
        ("most s until told", lambda row: or_never(row["told max"])),
        ("s until the end", lambda row: or_never(row["ended seconds"])),
        ("most s until the end", lambda row: or_never(row["ended max"])),
        "configuration",
    ),
    "reliability_disks": (
        *("disks", "went on"),
        ("without routes or TensorBoard", lambda row: row["warned"]),
        "stopped",
        ("with a sentence", lambda row: row["sentence"]),
        "anew",
        ("torn logs", lambda row: row["torn"]),
        *("equal", ("failed", lambda row: row["neither"]), "configuration"),
    ),
    "reliability_damage": (("reader", lambda row: row["case"]), "cases", "refused", "read", "found", "ms"),
    "simulation": ("case", "layers", "seconds", "target", "ok", "peak_mib", "added_mib", "configuration"),
    "demo": (
        *("case", "seed", "reward_first", "reward_last", "seconds", "rl_seconds_per_step", "k3_max", "configuration"),
    ),
}


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


def or_never(value: float | None) -> object:
    """Return "never" in place of None."""
    return "never" if value is None else value


def _micros(row: dict) -> str:
    """Seconds of attention, experts and a hop, as in a plan."""
    return " / ".join(f"{row[key]:.0f}" for key in ("attention_us", "expert_us", "hop_us"))


def shown(value: object) -> str:
    """Format one cell: three decimals, or powers of ten for what would be 0 with them."""
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)
