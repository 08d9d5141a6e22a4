"""How the ranks of a run ended: done, stopped, or which of them failed, and what to do next. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from relibra.errors import EngineError
from relibra.printable import printable
from relibra.rl.run.rank_processes import EndedRanks, signal_name
from relibra.rl.run.run_folder import has_checkpoint, is_unused
from relibra.rl.run.worker import Exit


class LostRankError(EngineError):
    """A rank was killed, hung or crashed, none failed with an error that would come again, and nobody asked to stop."""


def check_ended(ended: EndedRanks, run: Path, *, asked: bool) -> bool:
    """Return whether a run is complete; False: stopped by Ctrl-C or SIGTERM.

    Each different message of a failed run is printed once.

    ended    all ranks of the run
    asked    whether the run was asked to stop
    raises   EngineError if a rank failed; LostRankError if one was lost
    """
    for note in ended.notes:
        print(note, file=sys.stderr, flush=True)
    if all(code in (Exit.DONE, Exit.STOPPED) for code in ended.codes):
        return all(code == Exit.DONE for code in ended.codes)
    _print_messages(ended)
    kind = EngineError if Exit.FAILED in ended.codes or asked else LostRankError
    raise kind(_explain_failure(ended, run))


def print_resume_hint(run: Path) -> None:
    """Print how to continue a run, if it has a checkpoint."""
    if has_checkpoint(run):
        print(resume_hint(run), file=sys.stderr, flush=True)


def resume_hint(run: Path, *overrides: str) -> str:
    """Return how to continue a run that has a checkpoint."""
    words = [shlex.quote(str(run)), *overrides]
    return f"to resume from its last checkpoint: relibra train --resume {' '.join(words)}"


def _print_messages(ended: EndedRanks) -> None:
    """Print each different message of the ranks once; those about lost peers only if there is no other cause."""
    messages = [word.decode(errors="ignore").strip() for word in ended.last_words]
    caused = any(code not in (None, Exit.DONE, Exit.STOPPED, Exit.LOST_PEER) for code in ended.codes)
    caused = caused or bool(ended.lost)
    causes = [text for text, code in zip(messages, ended.codes, strict=True) if not (caused and code == Exit.LOST_PEER)]
    for message in dict.fromkeys(causes):
        ranks = [str(rank) for rank, own in enumerate(messages) if own == message]
        if message:
            print(printable(f"{_ranks(ranks)}: {message}"), file=sys.stderr, flush=True)


def _explain_failure(ended: EndedRanks, run: Path) -> str:
    """Return which ranks ended the run and the next step; a lost peer counts only if there is no other cause."""
    codes = ended.codes
    causes = [*ended.lost, *(f"the process of rank {rank} is stopped (SIGSTOP)" for rank in ended.stopped)]
    causes += [
        f"rank {rank} was killed by {signal_name(-code)}"
        for rank, code in enumerate(codes)
        if code is not None and code < 0
    ]
    left = [str(rank) for rank, code in enumerate(codes) if code == Exit.LEFT]
    if left:
        causes.append(
            f"{_ranks(left)} ended before the run was complete, without an error: does the reward, or a library, call "
            "os._exit?"
        )
    failed = [str(rank) for rank, code in enumerate(codes) if code in (Exit.FAILED, Exit.CRASHED)]
    if failed:
        causes.append(f"{_ranks(failed)} failed (see above)")
    if not causes:
        lost = ", ".join(str(rank) for rank, code in enumerate(codes) if code == Exit.LOST_PEER)
        causes.append(f"rank {lost} lost its peers (see above)")
    cause = f"the run ended early: {', '.join(causes)}"
    if not (run / "config.json").exists():  # removed by somebody else
        return cause
    if is_unused(run):
        return f"{cause}; no step was finished, and {run} was removed"
    next_step = resume_hint(run) if has_checkpoint(run) else "start a new run"
    return f"{cause}; {run} keeps every finished step; {next_step}"


def _ranks(ranks: Sequence[str]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
