"""Write the tables of docs/results.md and of the README from result files, so that no figure is typed by hand.

Run: python benchmarks/render.py
"""

import json
import re
from pathlib import Path

from relibra.files import write_text

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = {
    "recordings": ("case", "ranks", "mean", "median", "p95", "configuration"),
    "streaming": ("case", "million_rows", "seconds", "gb_per_second", "peak_mib", "configuration"),
    "routing": ("case", "median", "min", "max", "configuration"),
    "balancers_gpt_oss": (
        _BALANCERS := ("balancer", "sees", "8 ranks", "16 ranks", "32 ranks", "copies", "across nodes", "plan ms")
    ),
    "balancers_v2_lite": _BALANCERS,
    "planner": ("case", "ranks", "reached", "target", "ok", "bound", "copies", "unit", "configuration"),
    "planner_model": ("case", "ranks", "static", "plan", "ratio", "configuration"),
    "planner_growth": ("layers", "micro_batches", "ranks", "experts", "seconds", "ms_each", "configuration"),
    "demo": (
        "case",
        "seed",
        "reward_first",
        "reward_last",
        "seconds",
        "rl_seconds_per_step",
        "k3_max",
        "configuration",
    ),
}


def main() -> None:
    for path in (ROOT / "docs" / "results.md", ROOT / "README.md"):
        write_text(path, rendered(path.read_text()))
        print(path.relative_to(ROOT))


def rendered(page: str) -> str:
    """Return a page with the table after each `<!-- results: NAME -->` made anew, up to `<!-- end -->`."""
    return re.sub(
        r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", lambda m: m[1] + table(m[2]) + m[3], page, flags=re.DOTALL
    )


def table(name: str) -> str:
    """Return the rows of one result file as Markdown, with their common provenance underneath."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())
    columns = COLUMNS[name]
    lines = [" | ".join(["", *(column.replace("_", " ") for column in columns), ""]).strip()]
    lines.append("|" + "---|" * len(columns))
    lines += [" | ".join(["", *(_shown(row[column]) for column in columns), ""]).strip() for row in rows]
    first = rows[0]
    versions = ", ".join(f"{package} {number}" for package, number in first["versions"].items())
    dirty = " with uncommitted changes" if first["dirty"] else ""
    units = "; ".join(dict.fromkeys(row["unit"] for row in rows)) if "unit" not in columns else "see each row"
    counts = sorted({row["repetitions"] for row in rows})
    repetitions = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    note = (
        f"*{first['label']}: {units}; {repetitions} repetition(s); `{first['command']}` at commit "
        f"{first['commit'][:12]}{dirty}; {first['machine']}; {versions}.*"
    )
    return "\n".join([*lines, "", note, ""])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)


if __name__ == "__main__":
    main()
