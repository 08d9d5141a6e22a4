"""Options of `relibra serve MODEL`: copies of experts, whom the front answers, and how much it takes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="Of all workers: cpu, or cuda with a GPU for each.")]
RowTransport = Annotated[
    str,
    typer.Option(
        help="Rows between workers: shared (memory), tcp or gloo on CPUs, nccl on GPUs. Default: shared, or nccl.",
        show_default=False,
    ),
]
SpareExperts = Annotated[
    int, typer.Option(help="Experts that a worker holds beyond its share: copies, which answer where one is lost.")
]
RebalanceSeconds = Annotated[
    float, typer.Option(help="Time after which copies go to the experts with the most rows since; 0: never.")
]
KeySource = Annotated[str, typer.Option(help="Where keys of clients are: env:NAME, or file:PATH with one per line.")]
MostWaiting = Annotated[int, typer.Option(help="Most answers in the queue; more get status 429.")]
Deadline = Annotated[float, typer.Option(help="Seconds that a request may take, waiting included.")]
Updates = Annotated[bool, typer.Option("--updates", help="Let clients load other weights, as vLLM's do.")]
TimelineFile = Annotated[
    Path | None, typer.Option("--timeline", help="Write what each worker did, and when, for Perfetto in the end.")
]
UntilEof = Annotated[bool, typer.Option("--until-eof", help="Stop when the standard input ends.")]
