"""Resident slots hold the weights that are used, and every gradient goes home once, in any order of passes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import EngineError
from relibra.parallel.replicas.residency import Residency, keep_slots
from relibra.parallel.replicas.slot_buffer import SlotBuffer
from relibra.planning.costs.copies import pushed_copies
from relibra.planning.traffic.rank_tables import Push
from tests.parallel.steps import staying_replicas
from tests.planning.plans import planned_step


@st.composite
def resident_plans(draw, idle=True):
    """Draw a plan whose resident replicas often stay, with several groups of micro-batches."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    M, slots = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    plan, demand = planned_step(
        rng, nodes=1, per_node=draw(st.integers(2, 4)), micro_batches=M, layers=draw(st.integers(1, 3)), slots=slots
    )
    replica_MLRB, quota_MLRB = staying_replicas(rng, demand.load_MLE, plan.home_LE, plan.num_ranks, slots)
    if not idle:
        quota_MLRB = (replica_MLRB >= 0).astype(np.int32)
    group_M = np.sort(rng.integers(0, draw(st.integers(1, 3)), M)).astype(np.int32)
    return replace(plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB, resident=True, group_M=group_M)


class Slots:
    """The slots of all ranks: experts whose weights are there, and the gradients of which micro-batches are summed."""

    def __init__(self, plan):
        self.plan, self.residency = plan, Residency(plan)
        self.used_MLRB = np.where(plan.quota_MLRB > 0, plan.replica_MLRB, -1)
        L, R, B = self.used_MLRB.shape[1:]
        self.buffer_L = [SlotBuffer({}, B, R, of_layer=True) for _ in range(L)]
        self.held_LRB = np.full((L, R, B), -1)
        self.frozen_LRB = self.held_LRB.copy()
        self.sums, self.at_home, self.pushed = {}, Counter(), Counter()

    def pushes(self, m, layer):
        used_RB = self.used_MLRB[m, layer]
        return [Push(int(used_RB[r, b]), 0, 0, int(r), int(b), 1) for r, b in np.argwhere(used_RB >= 0)]

    def push(self, m, layer):
        missing, whole = self.buffer_L[layer].claim(self.pushes(m, layer), m)
        changed = {n for n, one in enumerate(missing) if self.frozen_LRB[layer, one.replica, one.slot] != one.expert}
        assert whole == changed, "frozen weights of an expert that stays are sent once"
        for one in missing:
            self.held_LRB[layer, one.replica, one.slot] = self.frozen_LRB[layer, one.replica, one.slot] = one.expert
        used = self.used_MLRB[m, layer] >= 0
        assert (self.held_LRB[layer][used] == self.used_MLRB[m, layer][used]).all()
        assert not self.buffer_L[layer].lacks(self.pushes(m, layer))
        self.pushed[m, layer] += len(missing)

    def forget(self):
        self.held_LRB[:] = -1
        for buffer in self.buffer_L:
            buffer.forget(frozen=False)

    def begin_forward(self, m, *, training=True):
        if self.residency.begin_forward(m, training=training):
            self.forget()

    def forward(self, m, *, follows=True):
        self.begin_forward(m)
        for layer in range(len(self.held_LRB)) if follows else ():
            self.push(m, layer)

    def backward(self, m, *, follows=True):
        for layer in reversed(range(len(self.held_LRB))):
            used_RB = self.used_MLRB[m, layer] if follows else np.full_like(self.used_MLRB[m, layer], -1)
            if follows:
                self.push(m, layer)
            settled = self.residency.settle(m, layer, self.pushes(m, layer) if follows else [])
            self.go_home(m, layer, settled.before)
            for rank, slot in np.argwhere(used_RB >= 0).tolist():
                if (rank, slot) in settled.fresh:
                    assert (layer, rank, slot) not in self.sums, "a sum is forgotten"
                    self.sums[layer, rank, slot] = (int(used_RB[rank, slot]), [])
                expert, summed = self.sums[layer, rank, slot]
                assert expert == used_RB[rank, slot], "gradients of two experts are mixed"
                summed.append(m)
            self.go_home(m, layer, settled.after)

    def go_home(self, now, layer, pushes):
        per_rank = self.plan.num_experts // self.plan.num_ranks
        for push in pushes:
            expert, summed = self.sums.pop((layer, push.replica, push.slot))
            assert expert == push.expert
            assert self.plan.physical_to_logical_map[layer, push.home * per_rank + push.home_slot] == expert
            self.at_home.update((layer, push.replica, expert, m) for m in summed)
            self.returned = (now, layer)

    def contributions(self, micro_batches):
        return Counter(
            (layer, rank, int(self.used_MLRB[m, layer, rank, slot]), m)
            for m in micro_batches
            for layer, rank, slot in np.argwhere(self.used_MLRB[m] >= 0).tolist()
        )


@given(resident_plans())
def test_experts_that_stay_keep_their_slot(plan):
    kept = keep_slots(plan)
    for m, layer, rank in np.ndindex(plan.replica_MLRB.shape[:3]):
        before, now = (
            sorted(zip(one.replica_MLRB[m, layer, rank], one.quota_MLRB[m, layer, rank], strict=True))
            for one in (plan, kept)
        )
        assert before == now
        if m and plan.group_M[m] == plan.group_M[m - 1]:
            old, new = kept.replica_MLRB[m - 1, layer, rank].tolist(), kept.replica_MLRB[m, layer, rank].tolist()
            assert all(old.index(e) == new.index(e) for e in old if e >= 0 and e in new)
    assert [one.sum() for one in pushed_copies(kept)] == [one.sum() for one in pushed_copies(plan)]


@given(resident_plans(idle=False))
def test_pushes_and_returns_are_those_of_the_price(plan):
    plan = keep_slots(plan)
    slots = Slots(plan)
    comes_MLRB, _, leaves_MLRB = pushed_copies(plan)
    for m in range(len(plan.group_M)):
        slots.forward(m)
        pushed = Counter(slots.pushed)
        returned_before = slots.at_home.total()
        slots.backward(m)
        assert slots.pushed == pushed, "nothing is pushed before backward"
        leaving = {
            (layer, rank, int(plan.replica_MLRB[m, layer, rank, slot]))
            for layer, rank, slot in np.argwhere(leaves_MLRB[m]).tolist()
        }
        assert {key[:3] for key in slots.at_home if key[3] == m} == leaving
        assert slots.at_home.total() - returned_before >= len(leaving)
    # A slot that stood empty still has the weights of the expert that comes back.
    for m, layer in np.ndindex(comes_MLRB.shape[:2]):
        assert slots.pushed[m, layer] <= comes_MLRB[m, layer].sum()
    assert slots.at_home == slots.contributions(range(len(plan.group_M)))


@given(resident_plans(), st.randoms(use_true_random=False))
def test_every_gradient_goes_home_once_in_any_order(plan, random):
    plan = keep_slots(plan)
    slots, followed = Slots(plan), []
    for _ in range(2):
        for group in np.unique(plan.group_M):
            micro_batches = np.flatnonzero(plan.group_M == group).tolist()
            follows = {m: random.random() < 0.8 for m in micro_batches}
            followed += [m for m in micro_batches if follows[m]]
            waiting = []
            while micro_batches or waiting:
                if micro_batches and (not waiting or random.random() < 0.5):
                    m = micro_batches.pop(random.randrange(len(micro_batches)))
                    slots.forward(m, follows=follows[m])
                    waiting.append(m)
                else:
                    m = waiting.pop(random.randrange(len(waiting)))
                    slots.backward(m, follows=follows[m])
            slots.residency.refuse_waiting("the group ends")
            slots.forget()
    assert slots.at_home == sum((slots.contributions([m]) for m in followed), Counter())


def staying_plan():
    """One expert in a slot of rank 1 over three micro-batches, idle in the second and the last; the last is a group."""
    plan, _ = planned_step(np.random.default_rng(0), nodes=1, per_node=2, micro_batches=4, layers=1, slots=1)
    replica_MLRB, quota_MLRB = np.full_like(plan.replica_MLRB, -1), np.zeros_like(plan.quota_MLRB)
    replica_MLRB[:, 0, 1, 0] = plan.physical_to_logical_map[0, 0]
    quota_MLRB[:, 0, 1, 0] = [1, 0, 0, 1]
    group_M = np.array([0, 0, 0, 1], np.int32)
    return replace(plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB, resident=True, group_M=group_M)


def test_an_idle_replica_returns_the_sum_that_waits_in_its_slot():
    slots = Slots(staying_plan())
    for m in range(3):
        slots.forward(m)
        assert not slots.at_home
        slots.backward(m)
    assert slots.returned == (2, 0)
    assert [key[3] for key in slots.at_home] == [0]


@pytest.mark.parametrize("m", [3, 0])
def test_a_skipped_micro_batch_is_found_in_the_next_pass(m):
    slots = Slots(staying_plan())
    for earlier in (0, 1):
        slots.forward(earlier)
        slots.backward(earlier)
    with pytest.raises(
        EngineError, match=f"micro-batch {m} starts another pass while resident .* of layer 1 on rank 1"
    ):
        slots.forward(m)
    slots.forward(m)  # said once: the gradients are lost


def test_passes_without_gradients_keep_weights():
    slots = Slots(staying_plan())
    slots.forward(0)
    slots.backward(0)
    for m in (0, 1, 2, 0):
        slots.begin_forward(m, training=False)
        slots.push(m, 0)
    assert sum(slots.pushed.values()) == 1
    for m in (1, 2):
        slots.forward(m)
        slots.backward(m)
    assert slots.at_home.total() == 1
    slots.begin_forward(0, training=False)  # an optimizer step may have been made
    slots.push(0, 0)
    assert slots.pushed[0, 0] == 2


def test_ranks_that_made_other_passes_have_another_digest():
    one, other = Slots(staying_plan()), Slots(staying_plan())
    for slots in (one, other):
        slots.forward(0)
        slots.backward(0)
    assert one.residency.digest() == other.residency.digest()
    other.forward(1)
    other.backward(1)
    assert one.residency.digest() != other.residency.digest()
