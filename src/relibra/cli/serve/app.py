"""`relibra serve`: the commands about serving; `relibra serve MODEL` is `relibra serve run MODEL`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from relibra.cli.serve import measure, place, plan, run


class ServeGroup(TyperGroup):
    """Commands; a first word that is none of them is the MODEL of `run`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the named command, else `run` with all words as its arguments."""
        if "run" in self.commands and args and args[0] not in self.commands:
            args = ["run", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=ServeGroup,
    no_args_is_help=True,
    help="Serve a model (relibra serve MODEL), measure it here, search how to serve it, or place its experts.",
)


@app.callback()
def about() -> None:
    """Serve a mixture-of-experts model with attention on some workers and experts on others, or plan which.

    Options of relibra serve MODEL: relibra serve run --help.

    Example: relibra serve models/mine --attention 1 --experts 1 --micro-batches 2
    """


app.command(name="run")(run.run)
app.command(name="measure")(measure.measure)
app.command(name="plan")(plan.plan)
app.command(name="place")(place.place)
