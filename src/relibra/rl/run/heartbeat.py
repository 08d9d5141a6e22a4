"""Signs of life of the ranks: which rank is awaited, which one is lost, and the Python stacks of all.

Work that may take longer on one rank than on others (rollout, rewards, writing) ends in `wait_for_ranks`
(`run/ranks.py`), which has no deadline. A thread of each rank therefore tells the others, through the store at which
they meet, that its process lives and what it does. Collectives keep the deadline of `parallel.timeout_seconds`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from relibra.environment import agent_has_store
from relibra.errors import LostPeerError
from relibra.rl.run.ranks import Rendezvous, present_work

BEAT_SECONDS = 2.0
NOTE_SECONDS = 60.0
"""Seconds of waiting before a line says for whom; said again after twice as long."""
BUSY_NOTES = 5
"""Multiple of `NOTE_SECONDS` without a waiting rank, before a line says what ranks do; again after twice as long."""
STORE_SECONDS = 10.0
"""Longest time to wait for an answer of the store."""
_log = logging.getLogger(__name__)


class HangingPeerError(LostPeerError):
    """Names the rank that hangs, or gives no sign of life."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank told last.

    number    grows with every beat; 0: it has not told anything
    stage     what it does, such as "reward of step 3"
    seconds   since that stage began, or its last wait began or ended
    waiting   it waits for the others
    failed    how its collective failed, "timed out" or "closed" (a peer ended); "left": its work is done; None: neither
    """

    number: int = 0
    stage: str = "start"
    seconds: float = 0.0
    waiting: bool = False
    failed: str | None = None


@dataclass
class Heartbeat:
    """The thread that tells the other ranks of this one, and watches them.

    store           a connection of its own to the store at which the ranks meet
    stacks          folder for the Python stacks of the ranks
    on_lost         called with a sentence when a rank is lost; ends the process
    lost_seconds    time without a beat after which a rank is lost
    start_seconds   time to its first beat after which a rank is lost
    """

    store: Any
    rank: int
    num_ranks: int
    stacks: Path
    on_lost: Callable[[str], None]
    lost_seconds: float
    start_seconds: float
    beat_seconds: float = BEAT_SECONDS
    note_seconds: float = NOTE_SECONDS
    _failed: str | None = None
    _number: int = 0
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    _next_note: float = 0.0
    _dumped: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _answered: float = 0.0

    def start(self) -> None:
        """Tell the first beat and start the thread."""
        self.store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self.stacks.mkdir(exist_ok=True)
        self._file = (self.stacks / f"rank-{self.rank:05d}.txt").open("w", encoding="utf-8")
        for rank in range(self.num_ranks):
            self.store.compare_set(f"beat/{rank}", "", json.dumps(asdict(Beat())))
        self.tell()
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()
        threading.Thread(target=self._watch_store, daemon=True, name="watch of the store").start()

    def stop(self) -> None:
        """End the thread; a file of stacks without any is removed."""
        self._stop.set()
        self._thread.join(1.0)  # it may wait for a store that is gone
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        file = Path(self._file.name)
        if file.exists() and not file.stat().st_size:
            file.unlink()
        with suppress(OSError):  # not empty, or another rank was faster
            self.stacks.rmdir()

    def tell(self) -> None:
        """Tell the other ranks what this one does."""
        self._number += 1
        stage, seconds, waiting = present_work()
        beat = Beat(number=self._number, stage=stage, seconds=seconds, waiting=waiting, failed=self._failed)
        self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def leave(self) -> None:
        """Tell the other ranks that this one has done its work: from now on nobody waits for it."""
        self._failed = "left"
        with suppress(RuntimeError):
            self.tell()

    def ask(self) -> list[Beat]:
        """Return what each rank told last."""
        keys = [f"beat/{rank}" for rank in range(self.num_ranks)]
        return [Beat(**json.loads(text)) for text in self.store.multi_get(keys)]

    def find_hanging(self, error: BaseException, timeout_seconds: float) -> str | None:
        """Tell the others that this rank's collective failed, wait for their beats, and write stacks.

        Waits up to about 4 x `beat_seconds`. Stacks of all ranks are written: the heartbeat thread of a rank that hangs
        writes its own, and this one writes where it waited.

        returns   which ranks hang; None: a rank ended
        """
        self._failed = "timed out" if "timed out" in str(error).lower() else "closed"
        self._dumped = True  # the stack of this thread is that of the error
        try:
            if self._failed == "timed out":
                self.store.set("dump", "1")
            self.tell()
            time.sleep(min(1.0, self.beat_seconds))  # a peer that timed out closes its connection before it says so
            if any(beat.failed == "timed out" for beat in self.ask()):
                time.sleep(2 * self.beat_seconds)  # the others notice, and threads of those that hang write stacks
            beats = self.ask()
            if self.rank == 0 and not agent_has_store():
                time.sleep(self.beat_seconds)  # this process has the store that the others ask
        except RuntimeError:  # the process that has the store is gone
            return None
        if all(beat.failed != "timed out" for beat in beats):
            return None
        traceback.print_exception(error, file=self._file)
        self._file.flush()
        hanging = [rank for rank, beat in enumerate(beats) if beat.failed is None]
        where = f"stacks of the ranks are in {self.stacks}"
        if not hanging:
            return f"all ranks waited {timeout_seconds:g} s for one another (parallel.timeout_seconds); {where}"
        return (
            f"{describe(hanging, beats)} did not come while the others waited {timeout_seconds:g} s "
            f"(parallel.timeout_seconds); {where}"
        )

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(self.beat_seconds):
            now = time.monotonic()
            if now - before > 4 * self.beat_seconds + STORE_SECONDS:  # this process was stopped itself
                self._seen.clear()
            before = now
            # If no thread of Python can run any more, a thread of C writes the stacks.
            faulthandler.dump_traceback_later(self.lost_seconds / 2, file=self._file)
            try:
                self.tell()
                beats = self.ask()
                asked = self.store.check(["dump"])
            except RuntimeError:
                continue  # the process that has the store ended, which `_watch_store` notices
            self._answered = time.monotonic()
            if asked:
                self._dump()
            self._watch(beats, self._answered)

    def _watch_store(self) -> None:
        """End this process when the store does not answer: requests to it may wait for ever."""
        before = time.monotonic()
        while not self._stop.wait(self.beat_seconds):
            now = time.monotonic()
            if now - before > 4 * self.beat_seconds or (agent_has_store() and _parent_is_stopped()):
                self._answered = now  # this process was stopped itself, or Ctrl-Z stopped the launcher
            before = now
            if now - self._answered > self.lost_seconds + self.beat_seconds:
                holder = "the process that has the store of the group (the launcher, or rank 0)"
                self._give_up(holder, self.lost_seconds)

    def _watch(self, beats: Sequence[Beat], now: float) -> None:
        for rank, beat in enumerate(beats):
            if rank not in self._seen or self._seen[rank][0] != beat.number:
                self._seen[rank] = (beat.number, now)
        for seconds, started in ((self.lost_seconds, True), (self.start_seconds, False)):
            lost = [
                rank
                for rank, (number, since) in self._seen.items()
                if rank != self.rank and (number > 0) is started and not beats[rank].failed and now - since > seconds
            ]
            if lost:
                self.store.set("dump", "1")
                self._give_up(describe(lost, beats), seconds)
        self._note_waiting(beats)

    def _note_waiting(self, beats: Sequence[Beat]) -> None:
        """Say for whom ranks wait, or what they do where none has waited for long; one of them says it."""
        waiting = [rank for rank, beat in enumerate(beats) if beat.waiting]
        speaker, least = (waiting[0], self.note_seconds) if waiting else (0, BUSY_NOTES * self.note_seconds)
        late = [rank for rank in range(len(beats)) if rank not in waiting]
        seconds = beats[speaker].seconds if waiting else max(beat.seconds for beat in beats)
        if seconds < least or not late:
            self._next_note = least
        elif speaker == self.rank and seconds >= self._next_note:
            self._next_note = 2 * seconds
            longest = max(late, key=lambda rank: beats[rank].seconds)
            busy = f"all ranks are at work, longest {describe([longest], beats)}"
            _log.warning(f"waiting {seconds:.0f} s for {describe(late, beats)}" if waiting else busy)

    def _dump(self) -> None:
        """Write the stacks of this process, once."""
        if not self._dumped:
            self._dumped = True
            faulthandler.dump_traceback(self._file, all_threads=True)

    def _give_up(self, lost: str, seconds: float) -> None:
        self._dump()
        self._stop.set()
        time.sleep(self.beat_seconds)  # the others write their stacks
        setting = "heartbeat_seconds" if seconds == self.lost_seconds else "timeout_seconds"
        self.on_lost(
            f"no sign of life of {lost} for {seconds:g} s (parallel.{setting}): its process is stopped, or its machine "
            f"is gone; stacks of the ranks are in {self.stacks}"
        )


def _parent_is_stopped() -> bool:
    with suppress(OSError):  # no Linux, or it ended
        return Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


@contextmanager
def heartbeats(
    run: Path, rendezvous: Rendezvous, timeout_seconds: float, lost_seconds: float, *, on_lost: Callable[[str], None]
) -> Iterator[None]:
    """Show signs of life while ranks join, work and leave, and name the rank that hangs where a collective fails.

    run               run folder, for stacks
    timeout_seconds   of collectives, and until a rank shows its first sign of life
    lost_seconds      parallel.heartbeat_seconds
    on_lost           called with a sentence, in a thread, when a rank gives no sign of life; ends the process
    raises            LostPeerError if a peer ended, HangingPeerError if one hangs
    """
    if rendezvous.num_ranks == 1:
        yield
        return
    rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
    beat = Heartbeat(rendezvous.store.clone(), rank, num_ranks, run / "stacks", on_lost, lost_seconds, timeout_seconds)
    beat.start()
    try:
        yield
        beat.leave()
    except LostPeerError as error:
        sentence = beat.find_hanging(error.__cause__ or error, timeout_seconds)
        if sentence is None:
            raise
        raise HangingPeerError(sentence) from error
    finally:
        beat.stop()


def describe(ranks: Sequence[int], beats: Sequence[Beat]) -> str:
    """Return ranks with what they do, such as "rank 1 (reward of step 3, for 75 s)"."""
    return ", ".join(f"rank {rank} ({beats[rank].stage}, for {beats[rank].seconds:.0f} s)" for rank in ranks)
