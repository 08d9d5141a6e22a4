"""Why unfinished responses are put back before groups are filtered: what the filter drops is long on average."""

from collections import defaultdict, deque

import numpy as np
import pytest
import torch

from relibra.rl.algorithms.advantages import mixed_groups

SLOTS, GROUP, WINDOW, LONGEST, STEPS = 64, 4, 8, 24, 100


def simulate(*, requeue_first):
    """Windows over groups of responses; a group is used while its finished responses differ in reward.

    returns   responses started, lengths of those that finished, those still under way
    """
    rng = np.random.default_rng(0)
    pool, started, finished, rewards = deque(), 0, [], defaultdict(list)
    chance = {}  # of a right answer, per group: many prompts are too easy or too hard to be mixed
    for _ in range(STEPS):
        active = []
        while len(active) < SLOTS:
            if pool:
                active.append(pool.popleft())
            else:
                active.append((started // GROUP, int(rng.integers(1, LONGEST + 1)), 0))
                started += 1
        active = [(group, length, min(length, done + WINDOW)) for group, length, done in active]
        for group, length, done in active:
            if done == length:
                finished.append(length)
                rewards[group].append(float(rng.random() < chance.setdefault(group, rng.choice([0.02, 0.5, 0.98]))))
        groups = torch.tensor([group for group, known in rewards.items() for _ in known])
        mixed = mixed_groups(torch.tensor([reward for known in rewards.values() for reward in known]), groups)
        used = set(groups[mixed].tolist())
        live = [one for one in active if one[2] < one[1]]
        pool.extend(live if requeue_first else [one for one in live if one[0] in used])
    return started, finished, list(pool)


def test_filtering_before_the_requeue_loses_long_responses():
    started, lengths, live = simulate(requeue_first=True)
    assert started == len(lengths) + len(live)
    assert len(live) <= SLOTS
    assert np.mean(lengths) == pytest.approx((1 + LONGEST) / 2, rel=0.05)
    started, short_lengths, live = simulate(requeue_first=False)
    assert started > 1.2 * (len(short_lengths) + len(live))
    assert np.mean(short_lengths) < 0.8 * np.mean(lengths)
