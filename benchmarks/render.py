"""Write the tables and figures of docs/results.md and of the README from result files: none is typed by hand.

Run: python benchmarks/render.py [--check] [--json]   (or: relibra bench render)
--check writes nothing and exits with 1 when a page is not what the result files say.

    <!-- results: NAME -->          a table up to the next <!-- end -->
    <!-- figure: NAME KEY -->       a figure up to the next <!-- end -->, which is the same in all rows
    <!-- figure: NAME KEY @ CASE --> the same, of the rows of one case
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence

from provenance import RESULTS, ROOT, quartiles
from results_files import Row, read_results

from relibra.errors import ConfigError, RelibraError
from relibra.files import write_text

Column = str | tuple[str, Callable[[dict], object]]
"""A key of the rows, or a title and what to make of a row."""

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
    "routing": ("case", "median", "min", "max", "configuration"),
    "balancers_gpt_oss": (
        _BALANCERS := (
            "balancer",
            "sees",
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
    "runtime": (
        "case",
        "balancer",
        "skew",
        "planned_skew",
        ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("quartiles", lambda row: _tokens_between(row)),
        ("/ all_to_all", lambda row: row["ratio_to_all_to_all"]),
        ("/ balanced", lambda row: row["ratio_to_balanced"]),
        ("exposed %", lambda row: f"{100 * row['exposed_share']:.1f}"),
        ("peak MiB", lambda row: f"{row['peak_bytes'] / 2**20:,.0f}"),
        ("slot MiB", lambda row: f"{row['slot_bytes'] / 2**20:,.1f}"),
        ("relocation s", lambda row: row["relocation_seconds"]),
        ("configuration", lambda row: sizes(row["sizes"])),
    ),
    "runtime_targets": (
        "case",
        "what",
        "reached",
        ("target", lambda row: f"{'<=' if row['at_most'] else '>='} {_shown(row['target'])}"),
        ("ok", lambda row: "yes" if row["ok"] else "NO"),
    ),
    "emulated_ranks": _OF_RANKS,
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
    "rl": (
        "case",
        "steps",
        ("s / step", lambda row: row["step_seconds"]),
        ("quartiles", lambda row: between(row, "step_seconds")),
        ("/ static", lambda row: row["ratio_to_static"]),
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
        ("updates", lambda row: _or_never(row["updates"])),
        ("decode steps", lambda row: _or_never(row["decode_steps"])),
        ("passes", lambda row: _or_never(row.get("passes", "-"))),
        ("seconds", lambda row: _or_never(row["wall_seconds"])),
        ("PPO / updates", lambda row: _or_never(row["updates_ratio"])),
        ("PPO / decode steps", lambda row: _or_never(row["decode_ratio"])),
        ("PPO / passes", lambda row: _or_never(row.get("passes_ratio", "-"))),
        ("PPO / seconds", lambda row: _or_never(row["wall_ratio"])),
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
    "simulation": ("case", "layers", "seconds", "target", "ok", "peak_mib", "added_mib", "configuration"),
    "demo": (
        *("case", "seed", "reward_first", "reward_last", "seconds", "rl_seconds_per_step", "k3_max", "configuration"),
    ),
}


PAGES = (ROOT / "docs" / "results.md", ROOT / "README.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stale = [str(path.relative_to(ROOT)) for path in PAGES if rendered(text := path.read_text()) != text]
    written = [] if options.check else write_pages()
    if options.json:
        print(json.dumps({"stale": stale, "written": written}))
    elif options.check:
        for page in stale:
            print(f"{page} is not what the result files say: relibra bench render")
    else:
        print(*written, sep="\n")
    return int(options.check and bool(stale))


def write_pages() -> list[str]:
    """Write the pages anew and return their names; none where one cannot be made.

    raises    ConfigError as `table` and `figure`
    """
    for path, text in [(path, rendered(path.read_text())) for path in PAGES]:
        write_text(path, text)
    return [str(path.relative_to(ROOT)) for path in PAGES]


def rendered(page: str) -> str:
    """Return a page with every table and figure that stands between a marker and `<!-- end -->` made anew."""
    page = re.sub(
        r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", lambda m: m[1] + table(m[2]) + m[3], page, flags=re.DOTALL
    )
    return re.sub(
        r"(<!-- figure: (\w+) (.+?)(?: @ (.+?))? -->).*?(<!-- end -->)",
        lambda m: m[1] + figure(m[2], m[3], m[4]) + m[5],
        page,
        flags=re.DOTALL,
    )


def figure(name: str, key: str, case: str | None = None) -> str:
    """Return one figure of a result file as text; says so where there is no such file.

    raises    ConfigError as `read_results`, when no row has it, or when rows have different ones
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "(not measured yet)"
    rows = [row for row in read_results(path) if case in (None, row["case"])]
    found = {_shown(row[key]) for row in rows if key in row}
    if len(found) != 1:
        of_case = "" if case is None else f" of case {case!r}"
        raise ConfigError(
            f"figure {key!r}{of_case} in {path.name} is {sorted(found) or 'not there'}: a figure in prose needs "
            "exactly one value; name a case, or another key"
        )
    return found.pop()


def table(name: str) -> str:
    """Return the rows of one result file as Markdown, with their common provenance underneath.

    "papers_TABLE" takes the rows of one table of papers.json.

    Without the file it says that there are no rows yet, so that a page can have its place ready.

    raises    ConfigError as `read_results`, or when a row lacks what the table shows
    """
    file, _, part = name.partition("_") if name.startswith("papers_") else (name, "", "")
    columns, path = COLUMNS[name], RESULTS / f"{file}.json"
    if not path.exists():
        return f"*Not measured yet: there is no `benchmarks/results/{file}.json`.*\n"
    rows = [row for row in read_results(path) if not part or row.get("table") == part]
    if not rows:
        return f"*Not measured yet: `benchmarks/results/{file}.json` has no rows of {part}.*\n"
    titles = [column.replace("_", " ") if isinstance(column, str) else column[0] for column in columns]
    cells = [_cells(row, columns, path.name) for row in rows]
    filled = [n for n, title in enumerate(titles) if title != "quartiles" or any(row[n] for row in cells)]
    lines = [" | ".join(["", *(row[n] for n in filled), ""]).strip() for row in (titles, *cells)]
    lines.insert(1, "|" + "---|" * len(filled))
    return "\n".join([*lines, "", _origin_in_words(rows, columns), ""])


def _cells(row: Row, columns: Sequence[Column], file: str) -> list[str]:
    needed: tuple[Column, ...] = ("repetitions", "dirty", *columns)  # the first two are told underneath
    try:
        return [_shown(row[key] if isinstance(key, str) else key[1](row)) for key in needed][2:]
    except KeyError as error:
        raise ConfigError(
            f"{file}: the row of case {row['case']!r} lacks {error}, which its table shows: measure it again with "
            f"{row['command']}"
        ) from error


def _origin_in_words(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Say what all rows have in common: their label, units, program, commit and machine."""
    first = rows[0]
    versions = ", ".join(f"{package} {number}" for package, number in first["versions"].items())
    dirty = " with uncommitted changes" if first["dirty"] else ""
    units = [row["unit"] for row in rows if "unit" in row and "unit" not in columns]
    counts = sorted({row["repetitions"] for row in rows})
    repetitions = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return (
        f"*{first['label']}: {'; '.join(dict.fromkeys(units)) or 'see each row'}; {repetitions} repetition(s); "
        f"`{first['command']}` at commit {first['commit'][:12]}{dirty}; {first['machine']}; {versions}.*"
    )


def sizes(of: dict) -> str:
    """Say in words what runtime.py notes about a model and its batches."""
    return (
        f"{of['layers']} layers, {of['top_k']} of {of['experts']} experts of {of['hidden']} x {of['width']}, "
        f"{of['micro_batches']} micro-batches of {of['samples']} x {of['length']:,} tokens per rank, 1 thread per rank"
    )


def between(row: dict, key: str) -> str:
    """Write the quartiles of a figure; nothing where a row has none."""
    ends = [row[name] for name in (f"{key} low", f"{key} high") if name in row]
    return " to ".join(map(_shown, ends))


def _tokens_between(row: dict) -> str:
    """Write the quartiles of the throughput, which follow from the seconds of each repetition."""
    total = row["tokens_per_second"] * statistics.median(row["seconds"])
    rates = quartiles([total / seconds for seconds in row["seconds"]], "rate")
    return " to ".join(f"{rate:,.0f}" for rate in rates.values())


def _or_never(value: float | None) -> object:
    return "never" if value is None else value


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RelibraError as error:
        sys.exit(f"error: {error}")
