"""The process that runs cases: memory capped, each case with a time limit. One JSON line per finding on stdout.

Run: python -m tests.fuzz.worker FIRST_SEED CASES [READER ...]
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from relibra.errors import RelibraError
from tests.fuzz.cases import CASES
from tests.fuzz.recordings import RECORDINGS
from tests.fuzz.servers import SERVERS

READERS = {**CASES, **RECORDINGS, **SERVERS}
MEMORY_BYTES = 1536 << 20
"""Address space beyond what imports and compiled loops have taken when the first case begins."""
SECONDS, WAITING_SECONDS = 5.0, 60.0
"""Of a case: of the processor, which other work on the machine does not change; of the clock."""
LONGEST_MESSAGE = 3000


class TooSlowError(BaseException):
    """A case took too long; no `Exception`, so that no reader catches it."""


def limit_memory():
    """Cap the address space of this process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)


REFUSED, READ = "refused", "read"


@contextmanager
def limited_time():
    """Raise `TooSlowError` in the block after SECONDS of the processor or WAITING_SECONDS of the clock.

    Only where `main` has set the handlers: elsewhere the signals would end the process.
    """
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITING_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_case(reader, seed, folder, limits=nullcontext):
    """Return REFUSED, READ, or what is wrong with a case."""
    rng = np.random.default_rng([seed, sorted(READERS).index(reader)])
    try:
        with limits():
            READERS[reader](rng, folder)
    except RelibraError as error:
        text = str(error)
        if len(text) > LONGEST_MESSAGE:
            return f"a message of {len(text)} characters: {text[:300]!r}"
        return REFUSED if text.strip() else f"no message: {error!r}"
    except TooSlowError:
        return f"took over {SECONDS} s of the processor, or {WAITING_SECONDS} s: {traceback.format_exc()[-600:]}"
    except BaseException:  # noqa: BLE001 - whatever a reader lets through is the finding
        return traceback.format_exc()[-1500:]
    return READ


def main():
    """Run the cases of each reader, then print how many ran."""
    first, count, readers = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or sorted(READERS)
    warnings.simplefilter("ignore")

    def end(*_):
        raise TooSlowError

    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGPROF, end)
    os.fsync = lambda _: None  # the files are read at once, and a busy disk takes longer than all cases
    with tempfile.TemporaryDirectory() as folder:
        folders = {reader: Path(folder) / reader for reader in readers}
        for reader in readers:
            folders[reader].mkdir()
            run_case(reader, 1 << 40, folders[reader], limited_time)  # imports, compiled loops
        limit_memory()
        for reader in readers:
            began = time.perf_counter()
            outcomes = Counter()
            for seed in range(first, first + count):
                outcome = run_case(reader, seed, folders[reader], limited_time)
                outcomes[outcome if outcome in (READ, REFUSED) else "found"] += 1
                if outcome not in (READ, REFUSED):
                    print(json.dumps({"reader": reader, "seed": seed, "problem": outcome}), flush=True)
            seconds = round(time.perf_counter() - began, 2)
            print(json.dumps({"reader": reader, "cases": count, "seconds": seconds, **outcomes}), flush=True)


if __name__ == "__main__":
    main()
