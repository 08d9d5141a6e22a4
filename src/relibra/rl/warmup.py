"""Supervised warm-up: the policy learns the form of an answer and the sums, then the slips of a teacher who tires.

So it knows better than it writes, which is what RL can then bring out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from relibra.rl.config import RunConfig
from relibra.rl.policy import clip_gradients
from relibra.rl.tasks.arithmetic import demonstrate, draw_problem
from relibra.rl.tokenizer import CharacterTokenizer

RAMP_STEPS = 20
_STREAM = 1
"""Random stream of the demonstrations, apart from that of the RL problems."""


def warm_up(
    model: nn.Module, tokenizer: CharacterTokenizer, config: RunConfig, on_step: Callable[[int, float], bool]
) -> None:
    """Train on demonstrations; collective.

    on_step   called on every rank after each step with (step, loss of this rank); True stops, on all ranks or on none
    """
    settings = config.warmup
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min((step + 1) / RAMP_STEPS, 1 - 0.9 * step / settings.steps)
        tokens_BN, attention_BN, target_BN = _demonstrations(config, tokenizer, step)
        device = next(model.parameters()).device
        logits_BNV = model(
            input_ids=tokens_BN.to(device), attention_mask=attention_BN.to(device), use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BNV[:, :-1].flatten(0, 1).float(), target_BN[:, 1:].flatten().to(device), ignore_index=-100
        )
        loss.backward()
        clip_gradients(model.parameters(), config.update.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step(step, float(loss.detach())):
            return


def _demonstrations(config: RunConfig, tokenizer: CharacterTokenizer, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's share of a step's demonstrations: tokens, attention mask, targets (-100 where not trained)."""
    rng = np.random.default_rng([config.run.seed, _STREAM, step])
    slip = config.warmup.slip * max(0.0, 2 * (step + 1) / config.warmup.steps - 1)
    texts = []
    for _ in range(config.warmup.batch):
        problem = draw_problem(
            rng, max_terms=config.task.max_terms, continue_probability=config.task.continue_probability
        )
        texts.append((problem.prompt, demonstrate(problem, rng, slip=slip)))
    share = texts[dist.get_rank() :: dist.get_world_size()] or texts[:1]
    encoded = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in share]
    width = max(len(prompt) + len(answer) for prompt, answer in encoded)
    shape = (len(encoded), width)
    tokens_BN = torch.full(shape, tokenizer.pad_id)
    attention_BN = torch.zeros(shape, dtype=torch.int64)
    target_BN = torch.full(shape, -100)
    for b, (prompt, answer) in enumerate(encoded):
        row = torch.tensor(prompt + answer)
        tokens_BN[b, : len(row)] = row
        attention_BN[b, : len(row)] = 1
        target_BN[b, len(prompt) : len(row)] = row[len(prompt) :]
    return tokens_BN, attention_BN, target_BN
