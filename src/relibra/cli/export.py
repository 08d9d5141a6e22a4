"""`relibra export`: the built-in model of a run as a folder that a server can start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import documented
from relibra.cli.outputs.terminal import print_text


@documented
def export(folder: Annotated[Path, typer.Argument()], settings: options.RunSettings = None) -> None:
    """Write the untrained built-in model of a run, so that a server can start before the run does.

    Weights follow from run.seed. A run with model.path needs none of this: its server starts from that folder.

    folder  New folder for model and tokenizer.

    Example: relibra export start examples/vllm.toml
    """
    from relibra.rl.config.run_config import load_config
    from relibra.rl.start_folder import write_start_folder

    write_start_folder(load_config(*options.file_and_overrides(settings)), folder)
    print_text(f"model   {folder}")
