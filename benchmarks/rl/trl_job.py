"""What `relibra bench trl` trains, and TRL's side of it: a program of its own, which loads nothing of relibra.

Run by the benchmark: python -m benchmarks.rl.trl_job model FOLDER, and then train FOLDER CELL, also under torchrun.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPTS, ANSWERS, PROMPT, ANSWER, MICRO_BATCH = 8, 8, 24, 72, 16
"""Prompts of an RL step, answers to each, tokens of a prompt and of an answer, answers of a micro-batch."""
WORDS, FILE_ROWS, LEARNING_RATE = 2048, 64, 1e-6
SIZES = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
PAD, END = 0, 1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job: processes, type of the passes, optimizer steps of an RL step, and RL steps."""

    ranks: int
    dtype: str
    mini_batches: int
    steps: int

    def as_json(self) -> str:
        """Return it for the command line."""
        return json.dumps(asdict(self))


def share_of_even_words(response: str, row: Mapping[str, Any]) -> float:  # noqa: ARG001
    """Return the reward of an answer: the share of even numbers among its words, as relibra calls it."""
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in response.split()) / ANSWER


def rewards(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Return the same rewards, as TRL calls them."""
    assert all(len(ids) == ANSWER for ids in completion_ids), "no answer ends early"
    return [share_of_even_words(text, {}) for text in completions]


def write_model(folder: Path) -> None:
    """Write a model with random weights, its tokenizer, and prompts.

    It never samples the end token: all embeddings have the same value in one coordinate, no layer writes there, and the
    output row of the token points against it.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    words = ["<pad>", "<end>", *(f"w{number}" for number in range(WORDS - 2))]
    split = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, vocab_size=WORDS, max_position_embeddings=2 * (PROMPT + ANSWER), norm_topk_prob=True,
        initializer_range=0.1, tie_word_embeddings=False, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.experts.down_proj[:, 0] = 0.0
        model.lm_head.weight[END] = 0.0
        model.lm_head.weight[END, 0] = -1000.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    drawn = torch.randint(2, WORDS, (FILE_ROWS, PROMPT)).tolist()
    lines = [json.dumps({"prompt": " ".join(words[token] for token in prompt)}) for prompt in drawn]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def train(folder: Path, cell: Cell) -> None:
    """Train with TRL's GRPOTrainer; each RL step adds a line to FOLDER/steps.txt."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    per_rank = PROMPTS * ANSWERS // cell.mini_batches // cell.ranks
    micro_batch = min(MICRO_BATCH, per_rank)
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=cell.dtype == "bfloat16",
        gradient_checkpointing=True,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=per_rank // micro_batch,
        steps_per_generation=per_rank // micro_batch * cell.mini_batches,
        num_generations=ANSWERS,
        max_completion_length=ANSWER,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=cell.steps * cell.mini_batches,
        loss_type="grpo",
        beta=0.0,
        router_aux_loss_coef=0.0,  # relibra has no such loss
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )

    class TellSteps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args, state, _control, **_):
            if args.process_index == 0 and state.global_step % cell.mini_batches == 0:
                with (folder / "steps.txt").open("a") as file:
                    file.write("\n")

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[TellSteps()],
    )
    trainer.train()


if __name__ == "__main__":
    if sys.argv[1] == "model":
        write_model(Path(sys.argv[2]))
    else:
        train(Path(sys.argv[2]), Cell(**json.loads(sys.argv[3])))
