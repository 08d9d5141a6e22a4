"""`relibra export`: the policy of a checkpoint, or the built-in model before its run, as a `transformers` folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import documented, within
from relibra.cli.outputs.terminal import print_note, print_text
from relibra.errors import ConfigError


class Dtype(StrEnum):
    """Types of weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@documented
def export(
    folder: Annotated[Path, typer.Argument()],
    settings: options.RunSettings = None,
    run: Path | None = None,
    step: Annotated[int | None, within(0)] = None,
    dtype: Dtype | None = None,
) -> None:
    """Write the policy of a checkpoint, or the untrained built-in model, so that a server can start before the run.

    Untrained weights follow from run.seed. Only without model.path: otherwise start the server from that folder.

    folder  New folder for model and tokenizer.
    run RUN  Run folder with the checkpoint; may be that of a run that goes on.
    step N  Steps after which the checkpoint was written; default: the latest.
    dtype  Dtype of the written weights of a checkpoint, which holds float32; default: model.dtype of the run; float32
      for LoRA runs (lora.rank), because bfloat16 can round away the merged change.

    Example: relibra export policy --run runs/demo --step 20
    """
    from relibra.rl.config.run_config import drop_operational, load_config

    if run is not None:
        from relibra.rl.run.checkpoints.policy_folder import write_policy_folder
        from relibra.rl.run.run_folder import read_settings

        if settings:
            raise ConfigError(f"--run {run} has its own settings: leave out {' '.join(settings)}")
        base = read_settings(run, "export")
        drop_operational(base)
        config = load_config(None, base=base)
        usual = Dtype.FLOAT32 if config.lora.rank else Dtype(config.model.dtype)
        checkpoint = write_policy_folder(config, run, step, folder, dtype or usual)
        print_note(f"policy of {checkpoint}")
        print_text(f"model   {folder}")
        return
    if step is not None or dtype is not None:
        raise ConfigError("--step and --dtype are for the checkpoint of a run: give --run too")
    from relibra.rl.run.checkpoints.policy_folder import write_start_folder

    write_start_folder(load_config(*options.file_and_overrides(settings)), folder)
    print_text(f"model   {folder}")
