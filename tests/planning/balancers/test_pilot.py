"""The micro-batches on which choices are priced before a whole step is planned."""

from dataclasses import replace

import numpy as np
import pytest
from relibra.planning.balancers.pilot import pilot_of

from tests.planning.balancers.requests import ask


@pytest.mark.parametrize(
    ("per_group", "asked", "kept"),
    [(100, 32, 32), (100, 60, 100), (40, 32, 40), (10, 32, 40), (1, 32, 32), (100, None, 100)],
)
def test_a_pilot_ends_with_a_group_and_pays_its_share_of_the_moves(per_group, asked, kept):
    request = ask(np.ones((100, 8, 2, 4)), 1, slots=1, steps_served=12)
    group_M = (np.arange(100) // per_group).astype(np.int32)
    schedules = [replace(request.demand, group_M=group_M)]
    if per_group == 100:  # one group may also be left out
        schedules.append(request.demand)
    for demand in schedules:
        pilot = pilot_of(request, demand, asked)
        assert len(pilot.demand.tokens_MLRE) == kept
        assert pilot.budget.steps_served == round(12 * 100 / kept)
