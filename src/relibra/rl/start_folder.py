"""The folder that a server starts from before a run has written any weights: the built-in model, untrained."""

from __future__ import annotations

from pathlib import Path

from relibra.errors import ConfigError
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run.checkpoints.policy_folder import built_in_model, check_new, write_model_folder


def write_start_folder(config: RunConfig, folder: Path) -> None:
    """Write the built-in model of a run as it is before its first step, with tokenizer, as a `transformers` folder.

    raises    ConfigError for a run with a model of its own, which is such a folder, and where nothing can be written
    """
    if config.model.path:
        raise ConfigError(f"model.path {config.model.path!r} is a folder to start a server from: nothing to export")
    check_new(folder)
    model, tokenizer = built_in_model(config)
    write_model_folder(model, tokenizer.save, folder)
