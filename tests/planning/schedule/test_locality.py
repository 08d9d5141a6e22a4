"""Samples that exchange ranks stay within the limits of a rank."""

import numpy as np
import pytest

from relibra.planning.levers.limits import ScheduleLimits
from relibra.planning.relibra_paper.locality import place_samples


@pytest.mark.parametrize(("attention", "exchanged"), [(221, True), (220, False)])
def test_a_rank_with_a_longer_single_sample_raises_no_limit(attention, exchanged):
    """Rank 0 attends for 400 alone; rank 1 would attend for 10^2 + 11^2 with the sample that wants to come."""
    length_S, rank_S = np.array([20, 10, 10, 11]), np.array([0, 1, 1, 2], dtype=np.int32)
    share_SLN = np.zeros((4, 1, 2), dtype=np.float32)
    share_SLN[[0, 1], 0, 0], share_SLN[2, 0, 1], share_SLN[3, 0, 0] = 1.0, 5.0, 5.0
    limits = ScheduleLimits(rank_tokens=30, rank_attention=attention, micro_batch_tokens=60.0)
    placed_S = place_samples(share_SLN, np.zeros(4, np.int32), rank_S, length_S, 4, 2, limits=limits)
    assert placed_S.tolist() == ([0, 1, 2, 1] if exchanged else [0, 1, 1, 2])
