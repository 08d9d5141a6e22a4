"""`relibra upcycle`: a model with more experts, copied from those that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import documented
from relibra.cli.outputs.terminal import print_result, progress
from relibra.errors import ConfigError

BATCHES, TOKENS = 10, 512
"""Sequences whose gradients give the utility of experts, and the tokens of each; the first one measures growth."""


@documented
def upcycle(
    model: Annotated[Path, typer.Argument()],
    experts: Literal["2x", "3x"],
    data: Path,
    output: Path,
    copies: Literal["uniform", "utility"] = "uniform",
    keep_function: Annotated[bool, typer.Option("--keep-function")] = False,
    as_json: options.Json = False,
) -> None:
    """Grow a model: copy experts and their router rows into a new folder of transformers, to be trained further.

    Where the top k stays as it is, choices of a token can be twins, copies of one expert: printed are the shares of
    tokens and of choices with twins, and the relative change of the logits.

    model MODEL  Folder of a mixture-of-experts model of transformers.
    experts  Experts afterwards / experts before.
    data FILE  Text to measure with.
    output FOLDER  New folder for the model.
    copies  uniform: of all experts alike; utility: of those with the largest gradients, at most 3 of each.
    keep_function  Choose twice (thrice) as many experts, so that the output stays, and twins train alike; routers whose
        gates or groups forbid it are refused.

    Example: relibra upcycle models/my-moe --experts 2x --data text.txt --output grown
    """
    from copy import deepcopy

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from relibra.replay.routers import find_routers
    from relibra.rl.model import upcycle as growing
    from relibra.rl.model.sharding import quiet_loading
    from relibra.rl.model.tokenizer import load_tokenizer, loading
    from relibra.rl.run.checkpoints.policy_folder import check_new, write_model_folder

    check_new(output)
    if copies == "utility" and (keep_function or experts == "3x"):  # at most three of each
        raise ConfigError("--copies utility with --keep-function or --experts 3x: all experts get as many copies there")
    if not (model / "config.json").is_file():
        raise ConfigError(f"MODEL {model} has no config.json: give the folder of a model of transformers")
    try:
        text = data.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {data} cannot be read: {error}; give a file of UTF-8 text") from None
    tokenizer = load_tokenizer(str(model))
    with loading(f"model {str(model)!r}"), quiet_loading():
        dtype = AutoConfig.from_pretrained(model).dtype or torch.float32
        old = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    ids_T = torch.tensor(tokenizer(text)["input_ids"][: BATCHES * TOKENS])
    if len(ids_T) < TOKENS:
        raise ConfigError(f"--data {data} has {len(ids_T)} tokens: give at least {TOKENS}, better {BATCHES * TOKENS}")
    batches = [ids_1T for ids_1T in ids_T[None].split(TOKENS, dim=1) if ids_1T.shape[1] == TOKENS]
    sites, factor = find_routers(old), int(experts[0])
    copies_LE = [[factor] * sites[0].num_experts] * len(sites)
    if copies == "utility":
        with progress("gradients of experts"):
            utility_LE = growing.expert_utility(deepcopy(old).float(), batches).tolist()
        copies_LE = [growing.copies_by_utility(one_E, factor * len(one_E)) for one_E in utility_LE]
    grown = growing.grow(old, copies_LE, top_k=factor * sites[0].top_k if keep_function else None)
    growth = growing.measure_growth(old.float(), deepcopy(grown).float(), copies_LE, batches[0])
    if keep_function:
        growing.check_kept(old, growth)
    grown.generation_config = old.generation_config
    write_model_folder(grown, tokenizer.save_pretrained, output)
    sizes = {"experts": sum(copies_LE[0]), "choices": find_routers(grown)[0].top_k, "tokens": TOKENS}
    print_result({**growth._asdict(), **sizes, "model": str(output)}, as_json=as_json)
