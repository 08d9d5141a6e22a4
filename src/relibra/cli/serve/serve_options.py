"""Options of `relibra serve MODEL`: copies of experts, whom the front answers, and how much it takes on."""

from __future__ import annotations

from typing import Annotated

import typer

SpareExperts = Annotated[
    int, typer.Option(help="Experts that a worker holds beyond its share: copies, which answer where one is lost.")
]
KeySource = Annotated[str, typer.Option(help="Where keys of clients are: env:NAME, or file:PATH with one per line.")]
MostWaiting = Annotated[int, typer.Option(help="Most answers in the queue; more get status 429.")]
Deadline = Annotated[float, typer.Option(help="Seconds that a request may take, waiting included.")]
Updates = Annotated[bool, typer.Option("--updates", help="Let clients load other weights, as vLLM's do.")]
UntilEof = Annotated[bool, typer.Option("--until-eof", help="Stop when the standard input ends.")]
