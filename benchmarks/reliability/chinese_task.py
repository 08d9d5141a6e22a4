"""A tiny model, prompts and a reward in Chinese, with characters that some readers take for the end of a line."""

from __future__ import annotations

import json
from pathlib import Path

CHARACTERS = (
    "一二三四五六七八九十加减等于，。\u2028\u2029\u0085\x0b\x0c\x1c\U00020000\U0002a6d6\U0001f600\U0001f409\u0301a?\n"
)
"""The alphabet; the last character ends a response. Three bytes a character, four outside of the first plane."""
_REWARD = '''"""The reward of this task."""


def by_characters(response, row):
    """Return a number that an untrained policy earns now and then."""
    return sum(map(ord, response)) % 3 / 2
'''


def write_task(folder: Path) -> tuple[str, ...]:
    """Write model, prompts and reward into a folder; return the settings that train on them from there."""
    import torch
    from transformers import AutoModelForCausalLM

    from relibra.rl.config.run_config import load_config
    from relibra.rl.toy.character_tokenizer import CharacterTokenizer
    from relibra.rl.toy.model import built_in_config

    tokenizer = CharacterTokenizer(CHARACTERS)
    sizes = load_config(None, ["model.hidden_size=16", "model.num_experts=4", "model.num_layers=2"]).model
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(built_in_config(sizes, tokenizer.vocab_size))
    model.save_pretrained(folder / "model")
    tokenizer.save(folder / "model")
    digits = "一二三四五六七八九"
    rows = [{"prompt": f"{a}加{b}\u2028等于\U00020000", "answer": a} for a in digits for b in digits]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    (folder / "chinese_rewards.py").write_text(_REWARD)
    return (
        "task.name=prompts", f"task.file={folder / 'prompts.jsonl'}", "task.reward=chinese_rewards:by_characters",
        f"model.path={folder / 'model'}", "model.dtype=float32", "update.activations=keep",
        "update.learning_rate=2e-4", "warmup.steps=0",
    )  # fmt: skip
