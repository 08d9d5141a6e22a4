"""All-to-all of responses between processes."""

import numpy as np
import pytest
import torch.distributed as dist

from relibra.errors import EngineError
from relibra.rl.rollout import response_arrays
from tests.rl.joined import on_ranks
from tests.rl.made_up import random_response, same

pytestmark = pytest.mark.slow

TYPES = [None, "uint8", "int16", "int32"]


def responses_of(case, rank, num_ranks):
    """What a rank holds before the exchange, and where each goes."""
    name, count = case
    rng = np.random.default_rng([len(name), rank])
    count = {"one rank only": count if rank == 1 else 0}.get(name, count)
    responses = [
        random_response(int(i * num_ranks + rank), 5, dtype=TYPES[int(rng.integers(4))], longest=200)
        for i in rng.permutation(count)
    ]
    targets = {
        "all to the last": [num_ranks - 1] * count,
        "all stay": [rank] * count,
        "in a ring": [(rank + 1) % num_ranks] * count,
    }.get(name, rng.integers(0, num_ranks, count).tolist())
    return responses, targets


CASES = [("random", 9), ("all to the last", 4), ("all stay", 3), ("in a ring", 5), ("one rank only", 6), ("nothing", 0)]


def expected_on(case, target, num_ranks):
    pairs = [pair for rank in range(num_ranks) for pair in zip(*responses_of(case, rank, num_ranks), strict=True)]
    return sorted((one for one, to in pairs if to == target), key=lambda one: one.sample_id)


def exchange_cases(_folder):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for round_bytes in (response_arrays.ROUND_BYTES, 2003 * num_ranks):  # one round; several, cut at odd places
        response_arrays.ROUND_BYTES = round_bytes
        for case in CASES:
            responses, targets = responses_of(case, rank, num_ranks)
            sent = response_arrays.bytes_to_others(responses, targets)
            assert (sent > 0) == any(target != rank for target in targets), case
            arrived = response_arrays.exchange_responses(responses, targets)
            assert responses == [], "what was sent leaves memory"
            wanted = expected_on(case, rank, num_ranks)
            assert [one.sample_id for one in arrived] == [one.sample_id for one in wanted], case
            assert all(same(one, other) for one, other in zip(arrived, wanted, strict=True)), case
    response_arrays.MAX_EXCHANGE_BYTES = 5000
    with pytest.raises(EngineError, match=r"a rank would receive .* at most 5000 are allowed"):
        response_arrays.exchange_responses(*responses_of(("all to the last", 9), rank, num_ranks))
    response_arrays.MAX_EXCHANGE_BYTES = 16 << 30
    response_arrays.exchange_responses(*responses_of(CASES[0], rank, num_ranks))  # all were refused, and all go on


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_responses_arrive_where_they_belong_bit_for_bit(num_ranks, tmp_path):
    on_ranks(num_ranks, exchange_cases, tmp_path)
