"""`relibra serve measure`: seconds of attention, experts and messages on this machine, for `relibra serve plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import documented, within
from relibra.cli.outputs.files import check_outputs, named, writing
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.cli.serve.run import INSTALL
from relibra.environment import uncollected_imports
from relibra.errors import missing_packages
from relibra.files import toml_value, write_text

POOR_R2 = 0.9  # of attention or expert: below it something else ran
JUDGED_ROWS = 8  # per expert, from which on lines are judged: products of fewer rows take time in steps


@documented
def measure(
    model: Annotated[Path, typer.Argument()],
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    context: Annotated[int, within(13, 1 << 20)] = 64,
    dtype: str = "auto",
    as_json: options.Json = False,
) -> None:
    """Time attention, experts and messages of a model on two worker processes here, a thread each, by batch size.

    Seconds are those of one layer in the mean decode step; attention has a share of what is outside of layers, expert
    is one expert, message one way. R2 is that of a line, from 8 rows per expert on. Let the machine do nothing else.

    model MODEL  Folder of a transformers MoE model, written by save_pretrained.
    output FILE  Write the tables, TOML, for relibra serve plan MODEL --measured FILE.
    context TOKENS  Mean tokens of a request while it decodes, prompt included.
    dtype  Of the weights: auto, float32, bfloat16, float16.

    Example: relibra serve measure runs/demo/policy --output nodes.toml
    """
    with missing_packages("relibra serve measure", INSTALL), uncollected_imports():
        from relibra.planning.deployment.measured_seconds import fit_line
        from relibra.serving.batch_seconds import measure_batches

    check_outputs(named("--output", output), [("MODEL", model)])
    with progress(f"measuring {model}"):
        tables = vars(measure_batches(model, context=context, dtype=dtype))
    if output is not None:
        with writing(output):
            write_text(output, "".join(f"{name} = {toml_value(table)}\n" for name, table in tables.items()))
    unjudged = sum(rows < JUDGED_ROWS for rows, _ in tables["expert"])
    r2 = {name: fit_line(table[unjudged:])[2] for name, table in tables.items() if len(table) > unjudged + 2}
    if min(r2.get("attention", 1.0), r2.get("expert", 1.0)) < POOR_R2:
        print_note("seconds do not follow a line, as of a busy machine: measure again while nothing else runs")
    facts = {
        "label": "measured",
        "r2": r2,
        "batches": [
            {"requests": a[0], "rows_per_expert": e[0], "attention": a[1], "expert": e[1], "message": m[1]}
            for a, e, m in zip(*tables.values(), strict=True)
        ],
    }
    print_result(facts, as_json=as_json)
