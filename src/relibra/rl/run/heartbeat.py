"""Signs of life of the ranks: which rank is awaited, which one is lost, and the Python stacks of all.

Work that may take longer on one rank than on others (rollout, rewards, writing) ends in `wait_for_ranks`
(`run/ranks.py`), which has no deadline. A thread of each rank therefore tells the others, through the store of the
group, that its process lives and what it does. Collectives keep the deadline of `parallel.timeout_seconds`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from relibra.errors import LostPeerError
from relibra.rl.run.ranks import is_peer_loss, present_work, wait_for_ranks

BEAT_SECONDS = 2.0
NOTE_SECONDS = 60.0
"""Seconds of waiting before a line says for whom; said again after twice as long."""
BUSY_NOTES = 5
"""Times `NOTE_SECONDS` after which a line says what ranks do none of which waits; said again after twice as long."""
STORE_SECONDS = 10.0
"""Longest time to wait for an answer of the store."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank told last.

    number    grows with every beat
    stage     what it does, such as "reward of step 3"
    seconds   for so long
    waiting   it waits for the others
    failed    None, or how its collective failed: "timed out", or "closed": a peer ended
    """

    number: int
    stage: str
    seconds: float
    waiting: bool
    failed: str | None = None


@dataclass
class Heartbeat:
    """The thread that tells the other ranks of this one, and watches them.

    store          a connection of its own to the store of the group
    stacks         folder for the Python stacks of the ranks
    on_lost        called with a sentence when a rank is lost; ends the process
    lost_seconds   without a beat, a rank is lost
    """

    store: Any
    rank: int
    num_ranks: int
    stacks: Path
    on_lost: Callable[[str], None]
    lost_seconds: float
    beat_seconds: float = BEAT_SECONDS
    note_seconds: float = NOTE_SECONDS
    _failed: str | None = None
    _number: int = 0
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    _next_note: float = 0.0
    _next_busy: float = 0.0
    _dumped: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _answered: float = 0.0

    def start(self) -> None:
        """Tell the first beat and start the thread."""
        self.store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._next_note = self.note_seconds
        self.stacks.mkdir(exist_ok=True)
        self._file = (self.stacks / f"rank-{self.rank:05d}.txt").open("w", encoding="utf-8")
        unheard = json.dumps(asdict(Beat(number=0, stage="start", seconds=0.0, waiting=False)))
        for rank in range(self.num_ranks):  # so that one that never tells anything is missed too
            self.store.compare_set(f"beat/{rank}", "", unheard)
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
        beat = {"number": self._number, "stage": stage, "seconds": seconds, "waiting": waiting, "failed": self._failed}
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def ask(self) -> list[Beat]:
        """Return what each rank told last."""
        keys = [f"beat/{rank}" for rank in range(self.num_ranks)]
        return [Beat(**json.loads(text)) for text in self.store.multi_get(keys)]

    def find_hanging(self, error: BaseException, timeout_seconds: float) -> str | None:
        """Tell the others that this rank's collective failed, wait for their beats, and write stacks.

        Waits up to about 4 x `beat_seconds`. Stacks of all ranks are written: of a rank that hangs by its thread, of
        this one where it waited.

        returns   which ranks hang; None: a rank ended
        """
        self._failed = "timed out" if "timed out" in str(error).lower() else "closed"
        self._dumped = True  # the stack of this thread is that of the error
        try:
            if self._failed == "timed out":
                self.store.set("dump", "1")
            self.tell()
            time.sleep(min(1.0, self.beat_seconds))  # of a peer that timed out, the connection closes before it says so
            if any(beat.failed == "timed out" for beat in self.ask()):
                time.sleep(2 * self.beat_seconds)  # the others notice, and threads of those that hang write stacks
            beats = self.ask()
            if self.rank == 0:
                time.sleep(self.beat_seconds)  # this process has the store that the others ask
        except RuntimeError:  # rank 0, which has the store, is gone
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
                continue  # rank 0 ended, which its peers notice by themselves, or `_watch_store` does
            self._answered = time.monotonic()
            if asked:
                self._dump()
            self._watch(beats, self._answered)

    def _watch_store(self) -> None:
        """End this process when rank 0, which has the store, does not answer: requests to it may wait for ever."""
        before = time.monotonic()
        while not self._stop.wait(self.beat_seconds):
            now = time.monotonic()
            if now - before > 4 * self.beat_seconds:  # this process was stopped itself
                self._answered = now
            before = now
            if now - self._answered > self.lost_seconds + self.beat_seconds:
                self._dump()
                self._give_up(
                    f"no sign of life of rank 0, which has the store of the group, for {self.lost_seconds:g} s "
                    f"(parallel.heartbeat_seconds): its process is stopped, or its machine is gone; stacks of "
                    f"the ranks are in {self.stacks}"
                )

    def _watch(self, beats: Sequence[Beat], now: float) -> None:
        for rank, beat in enumerate(beats):
            if rank not in self._seen or self._seen[rank][0] != beat.number:
                self._seen[rank] = (beat.number, now)
        lost = [
            rank
            for rank, (_, since) in self._seen.items()
            if now - since > self.lost_seconds and rank != self.rank and beats[rank].failed is None
        ]
        if lost:
            self.store.set("dump", "1")
            self._dump()
            self._give_up(
                f"no sign of life of {describe(lost, beats)} for {self.lost_seconds:g} s "
                f"(parallel.heartbeat_seconds): its process is stopped, or its machine is gone; stacks of "
                f"the ranks are in {self.stacks}"
            )
        self._note_waiting(beats)

    def _note_waiting(self, beats: Sequence[Beat]) -> None:
        """Say for whom ranks wait; the first of them says it."""
        waiting = [rank for rank, beat in enumerate(beats) if beat.waiting]
        self._note_busy(beats, max(beat.seconds for beat in beats) if not waiting else 0.0)
        if not waiting or len(waiting) == len(beats):
            self._next_note = self.note_seconds
            return
        seconds = beats[waiting[0]].seconds
        if waiting[0] == self.rank and seconds >= self._next_note:
            self._next_note = 2 * seconds
            late = [rank for rank in range(len(beats)) if rank not in waiting]
            _log.warning(f"waiting {seconds:.0f} s for {describe(late, beats)}")

    def _note_busy(self, beats: Sequence[Beat], seconds: float) -> None:
        """Say what the ranks do that have not waited for one another for so long; rank 0 says it."""
        if seconds < BUSY_NOTES * self.note_seconds:
            self._next_busy = BUSY_NOTES * self.note_seconds
        elif self.rank == 0 and seconds >= self._next_busy:
            self._next_busy = 2 * seconds
            longest = max(range(len(beats)), key=lambda rank: beats[rank].seconds)
            _log.warning(f"all ranks are at work, longest {describe([longest], beats)}")

    def _dump(self) -> None:
        """Write the stacks of this process, once."""
        if not self._dumped:
            self._dumped = True
            faulthandler.dump_traceback(self._file, all_threads=True)

    def _give_up(self, sentence: str) -> None:
        self._stop.set()
        time.sleep(self.beat_seconds)  # the others write their stacks; the store ends with rank 0
        self.on_lost(sentence)


@contextmanager
def heartbeats(
    run: Path,
    address: tuple[str, int],
    timeout_seconds: float,
    lost_seconds: float,
    *,
    on_lost: Callable[[str], None],
    attempt: int = 0,
) -> Iterator[None]:
    """Show signs of life inside, and name the rank that hangs where a collective fails; collective.

    run               run folder, for stacks
    address           host and port of the store of the group
    timeout_seconds   of collectives
    lost_seconds      parallel.heartbeat_seconds
    on_lost           called with a sentence, in a thread, when a rank gives no sign of life; ends the process
    attempt           how often `torchrun` has started the ranks again
    raises            LostPeerError if a peer ended or hangs
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks == 1:
        yield
        return
    host, port = address
    timeout = timedelta(seconds=timeout_seconds)
    shared = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"beats-{attempt}", shared)  # type: ignore[attr-defined]
    beat = Heartbeat(store, rank, num_ranks, run / "stacks", on_lost, lost_seconds)
    beat.start()
    try:
        dist.barrier()
        yield
        wait_for_ranks()  # inside: one that stops after its last work is missed as well
    except RuntimeError as error:
        sentence = beat.find_hanging(error, timeout_seconds) if is_peer_loss(error) else None
        if sentence is None:
            raise
        raise LostPeerError(sentence) from error
    finally:
        beat.stop()


def describe(ranks: Sequence[int], beats: Sequence[Beat]) -> str:
    """Return ranks with what they do, such as "rank 1 (reward of step 3, for 75 s)"."""
    return ", ".join(f"rank {rank} ({beats[rank].stage}, for {beats[rank].seconds:.0f} s)" for rank in ranks)
