"""How the ranks of a run ended: done, stopped, or which of them failed first, and what to do next. Imports no torch."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from relibra.errors import EngineError
from relibra.printable import printable_lines
from relibra.rl.run.run_folder import has_checkpoint, is_unused


class Exit(IntEnum):
    """Exit codes of a rank that failed; negative codes are the signal that killed it."""

    FAILED = 1
    """An expected error."""
    CRASHED = 3
    """An unexpected error, with its traceback on stderr; or the process that started the rank ended."""
    LOST_PEER = 4
    """Another rank ended."""
    HANGING_PEER = 5
    """Another rank, which the error names, hangs or gives no sign of life."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How the process of a rank failed.

    code      exit code; negative: the signal
    message   of its error; empty: it wrote none
    stopped   it was killed because it was stopped (SIGSTOP)
    """

    code: int
    message: str = ""
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class EndedRanks:
    """How the ranks of a run ended.

    done       by rank that has done its work and written the policy: whether all steps were made. Its exit code then
               says nothing: what a reward leaves behind may crash as the interpreter ends
    failures   of processes with an exit code other than 0, the first one first
    lost       which machines were lost with their ranks
    """

    num_ranks: int
    done: Mapping[int, bool]
    failures: Mapping[int, RankFailure]
    lost: tuple[str, ...] = ()


class LostRankError(EngineError):
    """A rank was killed, hung or crashed, none failed with an error that would come again, and nobody asked to stop."""


class NoRoomError(EngineError):
    """The cluster has no room for all ranks of the run; fewer ranks may fit."""


def check_ended(ended: EndedRanks, run: Path, *, asked: bool) -> bool:
    """Return whether a run is complete; False: stopped by Ctrl-C or SIGTERM.

    asked    whether the run was asked to stop
    raises   EngineError if a rank failed; LostRankError if one was lost
    """
    if len(ended.done) == ended.num_ranks:
        for rank, failure in ended.failures.items():
            if failure.code < 0 and failure.code != -signal.SIGTERM:
                how = f"was ended by {signal_name(-failure.code)}"
                print(f"rank {rank} had done its work when its process {how}", file=sys.stderr, flush=True)
        return all(ended.done.values())
    if asked and {one.code for one in ended.failures.values()} == {-signal.SIGTERM}:
        return False  # the signal went to all, before the ranks could handle it
    kind = EngineError if asked or any(one.code == Exit.FAILED for one in ended.failures.values()) else LostRankError
    raise kind(f"the run ended early: {_cause(ended)}{_next_step(run)}")


def print_resume_hint(run: Path) -> None:
    """Print how to continue a run, if it has a checkpoint."""
    if has_checkpoint(run):
        print(resume_hint(run), file=sys.stderr, flush=True)


def resume_hint(run: Path, *overrides: str) -> str:
    """Return how to continue a run that has a checkpoint."""
    words = [shlex.quote(str(run)), *overrides]
    return f"to resume from its last checkpoint: relibra train --resume {' '.join(words)}"


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _cause(ended: EndedRanks) -> str:
    """Return what ended a run: the first failure that is no consequence of another one; print the error of its rank."""
    failures = {rank: one for rank, one in ended.failures.items() if rank not in ended.done}
    left = [rank for rank in range(ended.num_ranks) if rank not in {*ended.done, *failures}]
    # After the first failure the launcher sends SIGTERM to the others, and ranks notice that they lost a peer.
    own = {rank: one for rank, one in failures.items() if one.code not in (-signal.SIGTERM, Exit.LOST_PEER)}
    if ended.lost:
        return ", ".join(ended.lost)
    if left and not own:
        return _left(left[0])
    rank, failure = next(iter((own or failures).items()))
    if failure.message:
        print(printable_lines(f"rank {rank}: {failure.message}"), file=sys.stderr, flush=True)
        lost = failure.code in (Exit.LOST_PEER, Exit.HANGING_PEER)
        return f"rank {rank} {'lost its peers' if lost else 'failed'} (see above)"
    if failure.stopped:
        return f"the process of rank {rank} is stopped (SIGSTOP)"
    if failure.code < 0:
        return f"rank {rank} was killed by {signal_name(-failure.code)}"
    return _left(rank) if failure.code == 0 else f"{_left(rank)} Its exit code is {failure.code}, see above"


def _left(rank: int) -> str:
    cause = "does the reward, or a library, call os._exit?"
    return f"rank {rank} ended before the run was complete, without an error: {cause}"


def _next_step(run: Path) -> str:
    if not (run / "config.json").exists():  # removed by somebody else
        return ""
    if is_unused(run):
        return f"; no step was finished, and {run} was removed"
    next_step = resume_hint(run) if has_checkpoint(run) else "start a new run"
    return f"; {run} keeps every finished step; {next_step}"
