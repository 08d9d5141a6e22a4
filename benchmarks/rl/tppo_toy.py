"""Truncated PPO against PPO on a toy of two tables: reward per update, decode steps.

A response adds up to a target: each token is +1, +2, nothing, or the end, and only a response that ends exactly at its
target is rewarded. The policy and the value model are tables over what is left to add. The same program is PPO that
waits for the longest response (a window as long as the cap) and T-PPO (shorter windows; unfinished responses go on in
the next step). Decoding takes as long as the longest response of a step. Rows go to results/tppo_toy.json.
Run: relibra bench tppo_toy [--quick] [--json] [--output FOLDER]
--quick takes two seeds and two settings, and writes no rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy import ndarray
from numpy.random import Generator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from relibra.rl.algorithms.advantages import egae, moments, whiten
from relibra.rl.algorithms.terms import LossTotals, clipped_surrogate, token_weights
from relibra.rl.algorithms.value_loss import clipped_value_loss

SLOTS, CAP = 128, 96
LOWEST, HIGHEST = -4, 40
"""What is left to add is seen only within this range."""
ADDED_A = np.array([1, 2, 0, 0])
END = 3
LEARNING_RATE, PASSES, CLIP_LOW, CLIP_HIGH, CLAMP, TAIL_DROP = 0.02, 2, 0.2, 0.28, 10.0, 1
VALUE_CLIP_LOW, VALUE_CLIP_HIGH = 0.5, 0.6
CRITIC_ONLY, TEST_EVERY, TEST_EPISODES, SOLVED, MOST_UPDATES = 20, 5, 200, 0.9, 600
SEEDS = 6
UNIT = (
    f"updates until {SOLVED:.0%} of {TEST_EPISODES} fresh episodes are solved ({MOST_UPDATES} where they never are), "
    "decode steps until then, idle share of slots; medians over seeds"
)


@dataclass(frozen=True)
class Setting:
    """Where targets come from (D1: mostly short, a heavy tail; D2: all long), the window, and how advantages end.

    bootstrap   value after the last token of an unfinished response: the one before it, or 0
    """

    targets: Literal["D1", "D2"]
    window: int
    gae_lambda: float = 0.95
    bootstrap: Literal["hold", "zero"] = "hold"

    @property
    def name(self) -> str:
        """Words for a table."""
        if self.window == CAP:
            return "sync PPO"
        return f"W = {self.window}, lambda {self.gae_lambda:g}, {self.bootstrap}"


SYNC, HALF, SHORT, SHORT_LONG_TRACE, SHORT_ZERO = (
    (CAP,),
    (32,),
    (8,),
    (8, 1.0, "hold"),
    (8, 1.0, "zero"),
)
SETTINGS = (
    *(Setting("D1", *setting) for setting in (SYNC, HALF, SHORT, SHORT_LONG_TRACE, SHORT_ZERO)),
    *(Setting("D2", *setting) for setting in (SYNC, HALF, SHORT, SHORT_LONG_TRACE, SHORT_ZERO, (8, 0.95, "zero"))),
)
QUICK = SETTINGS[:2]


@dataclass
class Slots:
    """Responses under way, one per slot; a finished one makes room for a fresh one.

    states_BC       what was left before each token, as a row of the tables
    old_values_BC   the value of that when the token was sampled
    """

    target_B: ndarray
    sum_B: ndarray
    length_B: ndarray
    states_BC: ndarray
    old_values_BC: ndarray


@dataclass(frozen=True)
class Window:
    """What one step added: states and tokens `[B, W]`, their number, which responses finished, rewards."""

    states_BW: ndarray
    actions_BW: ndarray
    added_B: ndarray
    finished_B: ndarray
    reward_B: ndarray


@dataclass(frozen=True)
class Outcome:
    """What it took to solve the toy."""

    updates: int
    solved: bool
    decode_steps: int
    idle: float
    continued: float


def draw_targets(targets: Literal["D1", "D2"], count: int, rng: Generator) -> ndarray:
    """Return numbers to reach, from 5 or from 20 to 40."""
    if targets == "D2":
        return rng.integers(20, 41, count)
    return np.clip(np.floor(5 * (1 - rng.random(count)) ** (-1 / 1.2)), 5, HIGHEST).astype(np.int64)


def new_slots(count: int) -> Slots:
    """Return empty slots: each counts as finished, at length 0."""
    zeros = np.zeros(count, dtype=np.int64)
    history_BC = np.zeros((count, CAP))
    return Slots(zeros.copy(), zeros.copy(), zeros.copy(), history_BC.astype(np.int64), history_BC.astype(np.float32))


def fill(slots: Slots, free_B: ndarray, targets: Literal["D1", "D2"], rng: Generator) -> None:
    """Start fresh responses in free slots."""
    slots.target_B[free_B] = draw_targets(targets, int(free_B.sum()), rng)
    slots.sum_B[free_B] = 0
    slots.length_B[free_B] = 0


def decode(slots: Slots, policy_SA: ndarray, window: int, rng: Generator) -> Window:
    """Add up to `window` tokens to every response, by the policy as it is now."""
    count, cumulative_SA = len(slots.target_B), policy_SA.cumsum(axis=1)
    states_BW = np.zeros((count, window), dtype=np.int64)
    actions_BW = np.zeros((count, window), dtype=np.int64)
    added_B = np.zeros(count, dtype=np.int64)
    ended_B, reward_B = np.zeros(count, dtype=bool), np.zeros(count, dtype=np.float32)
    rows = np.arange(count)
    for t in range(window):
        running_B = ~ended_B & (slots.length_B < CAP)
        if not running_B.any():
            break
        state_B = _state(slots)
        action_B = np.minimum((cumulative_SA[state_B] < rng.random((count, 1))).sum(axis=1), END)
        states_BW[running_B, t], actions_BW[running_B, t] = state_B[running_B], action_B[running_B]
        slots.states_BC[rows[running_B], slots.length_B[running_B]] = state_B[running_B]
        slots.sum_B += np.where(running_B, ADDED_A[action_B], 0)
        slots.length_B += running_B
        added_B += running_B
        ends_B = running_B & (action_B == END)
        reward_B[ends_B & (slots.sum_B == slots.target_B)] = 1.0
        ended_B |= ends_B
    return Window(states_BW, actions_BW, added_B, ended_B | (slots.length_B == CAP), reward_B)


def _state(slots: Slots) -> ndarray:
    return np.clip(slots.target_B - slots.sum_B, LOWEST, HIGHEST) - LOWEST


class Learner:
    """Tables of policy and values, and their optimizers."""

    def __init__(self) -> None:
        """Start with a policy that rarely ends, and values of 0."""
        states = HIGHEST - LOWEST + 1
        logits_SA = torch.zeros(states, len(ADDED_A))
        logits_SA[:, END] = -3.0
        self.logits_SA = logits_SA.requires_grad_()
        self.values_S = torch.zeros(states, requires_grad=True)
        self.policy_optimizer = torch.optim.Adam([self.logits_SA], LEARNING_RATE, foreach=False)
        self.value_optimizer = torch.optim.Adam([self.values_S], LEARNING_RATE, foreach=False)

    @property
    def policy_SA(self) -> ndarray:
        """Probabilities of the tokens in every state."""
        return self.logits_SA.detach().softmax(1).numpy()

    def advantages(self, window: Window, setting: Setting) -> tuple[Tensor, Tensor]:
        """Return whitened and clamped advantages `[B, W]`, and the mask of the tokens that train the policy."""
        length_B, finished_B = torch.from_numpy(window.added_B), torch.from_numpy(window.finished_B)
        columns_1W = torch.arange(setting.window).unsqueeze(0)
        rewards_BW = torch.from_numpy(window.reward_B)[:, None] * (columns_1W == length_B[:, None] - 1)
        advantage_BW = egae(
            self.values_S.detach()[torch.from_numpy(window.states_BW)],
            rewards_BW,
            length_B,
            finished_B if setting.bootstrap == "hold" else torch.ones_like(finished_B),
            gamma=1.0,
            lambda_B=torch.full((len(length_B),), setting.gae_lambda),
        )
        mask_BW = columns_1W < (length_B - torch.where(finished_B, 0, TAIL_DROP))[:, None]
        return whiten(advantage_BW, mask_BW, moments(advantage_BW, mask_BW)).clamp(-CLAMP, CLAMP), mask_BW

    def train_values(self, slots: Slots, window: Window) -> None:
        """Regress the values of finished responses, all tokens of them, on what they got."""
        finished_F = np.flatnonzero(window.finished_B)
        if not len(finished_F):
            return
        length_F = torch.from_numpy(slots.length_B[finished_F])
        columns_1C = torch.arange(CAP).unsqueeze(0)
        mask_FC = columns_1C < length_F[:, None]
        return_X = torch.from_numpy(window.reward_B[finished_F])[:, None].expand(-1, CAP)[mask_FC]  # not discounted
        state_X = torch.from_numpy(slots.states_BC[finished_F])[mask_FC]
        old_X = torch.from_numpy(slots.old_values_BC[finished_F])[mask_FC]
        weight_X = 1 / (length_F[:, None].expand(-1, CAP)[mask_FC].float() * SLOTS)
        for _ in range(PASSES):
            error_X = clipped_value_loss(
                self.values_S[state_X], old_X, return_X, clip_low=VALUE_CLIP_LOW, clip_high=VALUE_CLIP_HIGH
            )
            _step(self.value_optimizer, (weight_X * error_X).sum())

    def train_policy(self, window: Window, advantage_BW: Tensor, mask_BW: Tensor) -> None:
        """Make passes over the tokens of the window; one mini-batch, which is the whole step."""
        state_X = torch.from_numpy(window.states_BW)[mask_BW]
        action_X, advantage_X = torch.from_numpy(window.actions_BW)[mask_BW], advantage_BW[mask_BW]
        tokens = len(state_X)
        weight_X = token_weights(
            "token_over_step",
            mask_BW.sum(1, keepdim=True).expand_as(mask_BW)[mask_BW],
            LossTotals(
                tokens=tokens,
                responses=SLOTS,
                positive_tokens=0,
                step_tokens=tokens,
                step_positive_tokens=0,
                mini_batches=1,
            ),
            CAP,
        )
        old_X = None
        for _ in range(PASSES):
            log_prob_X = self.logits_SA[state_X].log_softmax(-1).gather(-1, action_X[:, None])[:, 0]
            old_X = log_prob_X.detach() if old_X is None else old_X
            surrogate_X, _ = clipped_surrogate(
                log_prob_X - old_X, advantage_X, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=0.0
            )
            _step(self.policy_optimizer, -(weight_X * surrogate_X).sum())


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def train(setting: Setting, seed: int) -> Outcome:
    """Train until the toy is solved, or for MOST_UPDATES updates."""
    rng = np.random.default_rng(seed)
    learner, slots = Learner(), new_slots(SLOTS)
    free_B = np.ones(SLOTS, dtype=bool)
    decode_steps = tokens = continued = 0
    for update in range(1, MOST_UPDATES + 1):
        continued += int((~free_B).sum())
        fill(slots, free_B, setting.targets, rng)
        start_B = slots.length_B.copy()
        window = decode(slots, learner.policy_SA, setting.window, rng)
        _remember_values(slots, start_B, window, learner)
        decode_steps += int(window.added_B.max())
        tokens += int(window.added_B.sum())
        advantage_BW, mask_BW = learner.advantages(window, setting)
        learner.train_values(slots, window)
        if update > CRITIC_ONLY:
            learner.train_policy(window, advantage_BW, mask_BW)
        free_B = window.finished_B
        solved = update % TEST_EVERY == 0 and solved_share(setting, learner.policy_SA, rng) >= SOLVED
        if solved:
            break
    idle = 1 - tokens / (SLOTS * decode_steps)
    return Outcome(update, solved, decode_steps, idle, continued / (SLOTS * update))


def _remember_values(slots: Slots, start_B: ndarray, window: Window, learner: Learner) -> None:
    values_BW = learner.values_S.detach().numpy()[window.states_BW]
    row, column = np.nonzero(np.arange(values_BW.shape[1]) < window.added_B[:, None])
    slots.old_values_BC[row, start_B[row] + column] = values_BW[row, column]


def solved_share(setting: Setting, policy_SA: ndarray, rng: Generator) -> float:
    """Sample fresh episodes to their ends and return the share that reached the target."""
    slots = new_slots(TEST_EPISODES)
    fill(slots, np.ones(TEST_EPISODES, dtype=bool), setting.targets, rng)
    return float(decode(slots, policy_SA, CAP, rng).reward_B.mean())


def measured(settings: Iterable[Setting], seeds: int) -> list[dict]:
    """Train each setting with each seed; one row per setting, ratios to the first one with the same targets."""
    rows: list[dict] = []
    for setting in settings:
        outcomes = [train(setting, seed) for seed in range(seeds)]
        of_sync = next((row for row in rows if row["targets"] == setting.targets), None)
        row = {
            "case": f"{setting.targets}, {setting.name}", "label": "measured", "unit": UNIT, "seed": 0,
            "repetitions": seeds, "targets": setting.targets, "setting": setting.name,
            "updates": float(np.median([one.updates for one in outcomes])),
            **quartiles([one.updates for one in outcomes], "updates"),
            "decode_steps": float(np.median([one.decode_steps for one in outcomes])),
            **quartiles([one.decode_steps for one in outcomes], "decode_steps"),
            "idle": float(np.median([one.idle for one in outcomes])),
            "continued": float(np.median([one.continued for one in outcomes])),
            "solved": sum(one.solved for one in outcomes),
            "updates_of_seeds": [one.updates for one in outcomes],
            "configuration": (
                f"{SLOTS} slots, cap {CAP} tokens, first {CRITIC_ONLY} updates train values only; checkpoint: the "
                "first that solves"
            ),
        }  # fmt: skip
        for name in ("updates", "decode_steps"):
            row[f"{name} / sync"] = row[name] / (of_sync or row)[name]
        rows.append(row)
    return rows


def print_rows(rows: list[dict]) -> None:
    """Print a table for each distribution of targets."""
    columns = ("\nsetting", "\nupdates", "/\nsync", "decode\nsteps", "/\nsync", "\nidle", "\ncontinued", "\nsolved")
    for targets in dict.fromkeys(row["targets"] for row in rows):
        table = Table(title=targets, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        for column in columns:
            table.add_column(column, justify="left" if column.endswith("setting") else "right", no_wrap=True)
        for row in rows:
            if row["targets"] == targets:
                table.add_row(
                    row["setting"],
                    f"{row['updates']:.0f}",
                    f"{row['updates / sync']:.2f}",
                    f"{row['decode_steps']:.0f}",
                    f"{row['decode_steps / sync']:.2f}",
                    f"{row['idle']:.2f}",
                    f"{row['continued']:.2f}",
                    f"{row['solved']}/{row['repetitions']}",
                )
        Console().print(table)
    print(UNIT)


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = measured(QUICK, 2) if options.quick else measured(SETTINGS, SEEDS)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick:
        print(write_results("tppo_toy", rows, "relibra bench tppo_toy", options.output), file=sys.stderr)
