"""The warm-up: demonstrations in rows of a limited length teach what they teach in one row."""

import copy

import pytest
import torch

from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import Arithmetic
from relibra.rl.toy.warmup import warm_up
from tests.replay.tiny_models import tiny_model
from tests.rl.joined import tiny_config
from tests.rl.ranks_at_work import run_on_ranks

pytestmark = pytest.mark.usefixtures("group")

TASK = Arithmetic(seed=0, max_terms=6, continue_probability=0.5)
TOKENIZER = CharacterTokenizer(TASK.characters)


def warmed(model, tokens):
    """Return the model after three steps, the losses, and the lengths of the rows it was fed."""
    model, losses, lengths = copy.deepcopy(model), [], []
    handle = model.register_forward_pre_hook(
        lambda _, _args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    config = tiny_config("warmup.steps=3", "warmup.batch=12", f"update.micro_batch_tokens={tokens}")
    assert warm_up(
        model,
        TASK,
        TOKENIZER,
        config.warmup,
        config.update,
        seed=config.run.seed,
        on_step=lambda _step, loss: losses.append(loss),
    )
    handle.remove()
    return model, losses, lengths


def test_rows_fit_into_a_micro_batch_and_teach_the_same():
    model = tiny_model("qwen3_moe")
    whole, losses, lengths = warmed(model, 10_000)
    assert len(lengths) == 3, "all of a step in one row"
    in_rows, same_losses, row_lengths = warmed(model, 50)
    assert max(row_lengths) <= 50
    assert len(row_lengths) > 6
    assert sum(row_lengths) == sum(lengths)
    assert same_losses == pytest.approx(losses, rel=1e-5)
    assert losses[2] != losses[0]
    for one, other in zip(whole.parameters(), in_rows.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_ranks_with_unequal_numbers_of_rows_wait_for_each_other(tmp_path):
    settings = ("warmup.steps=4", "warmup.batch=7", "run.steps=0")
    cases = {str(tokens): (*settings, f"update.micro_batch_tokens={tokens}") for tokens in (50, 10_000)}
    found = run_on_ranks(2, cases, tmp_path)
    for name, weights in found["50"].weights.items():
        torch.testing.assert_close(weights, found["10000"].weights[name], atol=1e-4, rtol=1e-3)
