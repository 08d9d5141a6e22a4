"""Grow a small model from 8 to 16 experts at a quarter of its training, beside 8 and 16 experts from the start.

Each of 24 languages has a table of its own, so more experts lower the loss. Closure is the part of the gap between 8
and 16 experts that growth closes. Measured here in a minute or two; rows are printed as they come.
"""

from __future__ import annotations

import os
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from relibra.rl.model.upcycle import grow, measure_growth  # noqa: E402

STEPS, TOKENS, LANGUAGES, VOCABULARY = 240, 32, 24, 32


def build(experts: int, seed: int) -> transformers.PreTrainedModel:
    """Return a random model of one expert layer that chooses 2 of `experts`."""
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=LANGUAGES + VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16,
            norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.01,
        )
    )  # fmt: skip


def sentences(tables: torch.Tensor, number: int, random: torch.Generator) -> torch.Tensor:
    """Return token ids [number, TOKENS]: the language, then a walk through its table."""
    language = torch.randint(LANGUAGES, (number,), generator=random)
    ids = [language, torch.randint(VOCABULARY, (number,), generator=random)]
    while len(ids) < TOKENS:
        likely = torch.randint(2, (number,), generator=random)
        ids.append(tables[language, ids[-1], likely])
    return torch.stack([ids[0], *(one + LANGUAGES for one in ids[1:])], dim=1)


def train(model: torch.nn.Module, tables: torch.Tensor, steps: range) -> float:
    """Train with a new optimizer on the sentences of some steps; return the seconds."""
    optimizer, start = torch.optim.AdamW(model.parameters(), lr=3e-3), time.perf_counter()
    for step in steps:
        ids = sentences(tables, 64, torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - start


@torch.no_grad()
def loss_of(model: torch.nn.Module, tables: torch.Tensor) -> float:
    """Return the loss per token on sentences that nobody trained on."""
    ids = sentences(tables, 256, torch.Generator().manual_seed(10**6))
    logits = model(input_ids=ids).logits[:, 1:-1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten()))


def main() -> None:
    """Print a row per seed: losses, closure, seconds, and the twins right after growth."""
    print("seed  loss of 8   of 16   grown  closure  seconds of 8   of 16   grown  choices with twins")
    for seed in range(3):
        tables = torch.randint(VOCABULARY, (LANGUAGES, VOCABULARY, 2), generator=torch.Generator().manual_seed(seed))
        small, large = build(8, seed), build(16, seed)
        early = train(small, tables, range(STEPS // 4))
        grown = grow(small, [[2] * 8])
        ids = sentences(tables, 1, torch.Generator().manual_seed(seed))
        twins = measure_growth(small, grown, [[2] * 8], ids).twin_choices
        seconds = {
            "small": early + train(small, tables, range(STEPS // 4, STEPS)),
            "large": train(large, tables, range(STEPS)),
            "grown": early + train(grown, tables, range(STEPS // 4, STEPS)),
        }
        of_8, of_16, of_grown = (loss_of(model, tables) for model in (small, large, grown))
        closure = (of_8 - of_grown) / (of_8 - of_16)
        print(
            f"{seed:4d}  {of_8:9.3f}  {of_16:6.3f}  {of_grown:6.3f}  {closure:7.0%}  {seconds['small']:12.1f}  "
            f"{seconds['large']:6.1f}  {seconds['grown']:6.1f}  {twins:8.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
