"""The folder that a server starts from before a run has written any weights: the built-in model, untrained."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from relibra.errors import ConfigError
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.sharding import quiet_loading
from relibra.rl.model.tokenizer import make_tokenizer
from relibra.rl.tasks.make import make_task
from relibra.rl.toy.model import built_in_config, initial_model


def write_start_folder(config: RunConfig, folder: Path) -> None:
    """Write the built-in model of a run as it is before its first step, with tokenizer, as a `transformers` folder.

    raises    ConfigError for a run with a model of its own, which is such a folder, and where nothing can be written
    """
    if config.model.path:
        raise ConfigError(f"model.path {config.model.path!r} is a folder to start a server from: nothing to export")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: choose a new folder")
    task = make_task(config.task, config.run.seed, 0)
    tokenizer = make_tokenizer(config.model.source, task.characters, trust_remote_code=False)
    model = initial_model(
        built_in_config(config.model, tokenizer.vocab_size, config.rollout.least_head_dim), config.run.seed
    )
    temporary = folder.absolute().with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with quiet_loading():
            model.save_pretrained(temporary)
        tokenizer.save(temporary)
        for file in temporary.iterdir():
            file.chmod(0o644)  # a server may run as another user
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write the model into {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
