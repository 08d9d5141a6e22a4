"""Rewards that failed: reported, and accepted up to a limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from relibra.errors import ConfigError
from relibra.rl.run.ranks import gather_json, wait_for_ranks

_log = logging.getLogger(__name__)


def check_failed_rewards(errors: Sequence[str], rated: int, *, where: str) -> int:
    """Return how many rewards failed on all ranks, and log the first of their errors; collective.

    errors    of this rank
    rated     responses of this rank that were to get a reward
    where     for messages, such as "step 3"
    raises    ConfigError, on all ranks, where more failed than may
    """
    wait_for_ranks()  # a verifier may take long on one rank
    counts_R = gather_json({"failed": len(errors), "rated": rated, "first": errors[0] if errors else ""})
    failed, total = sum(rank["failed"] for rank in counts_R), sum(rank["rated"] for rank in counts_R)
    if not failed:
        return 0
    first = next(rank["first"] for rank in counts_R if rank["first"])
    told = f"{where}: {failed} of {total} rewards failed"
    if failed > allowed_failures(total):
        raise ConfigError(f"{told}, and {allowed_failures(total)} may; the first: {first}")
    if dist.get_rank() == 0:
        _log.warning("%s, these responses are left out; the first: %s", told, first)
    return failed


def allowed_failures(rated: int) -> int:
    """Return how many of so many rewards may fail: a tenth, but one at least, and never all of several.

    >>> [allowed_failures(rated) for rated in (1, 2, 40)]
    [1, 1, 4]
    """
    return min(max(1, rated // 10), max(1, rated - 1))
