"""Exported model folders: the policy of a checkpoint, or the built-in model before its first step, by one process."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from relibra.errors import ConfigError
from relibra.files import let_all_read
from relibra.parallel.adapters import add_adapters
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.adapter_values import merge_adapters
from relibra.rl.model.sharding import quiet_loading
from relibra.rl.model.tokenizer import load_tokenizer, loading
from relibra.rl.run.checkpoints.checkpoint import load_weights
from relibra.rl.run.run_folder import step_folders
from relibra.rl.tasks.make import make_task
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.model import built_in_config, initial_model


def write_policy_folder(config: RunConfig, run: Path, step: int | None, folder: Path, dtype: str) -> Path:
    """Write the policy of a checkpoint with its tokenizer as a `transformers` folder, and return the checkpoint.

    LoRA adapters are merged in float32 into the base weights, which are loaded in model.dtype as in training.

    step      finished steps of the checkpoint; None: of the latest one
    raises    ConfigError if there is no such checkpoint, it is damaged, or nothing can be written
    """
    found = dict(step_folders(run / "checkpoints"))
    if not found:
        raise ConfigError(f"{run} has no checkpoint to export: set checkpoint.every, or wait for its first one")
    if step is not None and step not in found:
        raise ConfigError(f"--step {step}: {run} has checkpoints after the steps {', '.join(map(str, sorted(found)))}")
    checkpoint = found[max(found) if step is None else step]
    check_new(folder)
    if config.model.path:
        trusted, source = config.model.trust_remote_code, config.model.source
        with loading(f"model.path {config.model.path!r}"), quiet_loading():
            loaded = config.model.dtype if config.lora.rank else dtype
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, loaded), trust_remote_code=trusted
            )
        save_tokenizer = load_tokenizer(source, trust_remote_code=trusted).save_pretrained
    else:
        model, tokenizer = built_in_model(config)
        model, save_tokenizer = model.to(getattr(torch, dtype)), tokenizer.save
    if config.lora.rank:
        add_adapters(model, config.lora.rank, config.lora.alpha)
    load_weights(checkpoint, "policy", model)
    if config.lora.rank:
        merge_adapters(model).to(getattr(torch, dtype))
    write_model_folder(model, save_tokenizer, folder)
    return checkpoint


def write_start_folder(config: RunConfig, folder: Path) -> None:
    """Write the built-in model of a run before its first step, with tokenizer, as a folder for a server.

    raises    ConfigError if model.path is set (that folder can be served as it is), or nothing can be written
    """
    if config.model.path:
        raise ConfigError(f"model.path {config.model.path!r} is a folder to start a server from: nothing to export")
    check_new(folder)
    model, tokenizer = built_in_model(config)
    write_model_folder(model, tokenizer.save, folder)


def built_in_model(config: RunConfig) -> tuple[Any, CharacterTokenizer]:
    """Return the built-in model of a run as it is before its first step, and its tokenizer."""
    characters = make_task(config.task, config.run.seed, 0).characters
    assert characters is not None, "RunConfig refuses a task without an alphabet for the built-in model"
    tokenizer = CharacterTokenizer(characters)
    sizes = built_in_config(config.model, tokenizer.vocab_size, config.rollout.least_head_dim)
    return initial_model(sizes, config.run.seed), tokenizer


def check_new(folder: Path) -> None:
    """Raise ConfigError if there is a file, or a folder with files, of this name."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: choose a new folder")


def write_model_folder(model: Any, save_tokenizer: Callable[[Path], object], folder: Path) -> None:
    """Write a model and its tokenizer into a new folder, there only when complete; raise ConfigError if it cannot."""
    temporary = folder.absolute().with_name(f".{folder.name[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.mkdir(parents=True)
        with quiet_loading():
            model.save_pretrained(temporary)
        save_tokenizer(temporary)
        let_all_read(temporary)
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write the model into {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
