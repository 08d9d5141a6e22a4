"""`ServerProcess`: a rollout server on this machine, started, waited for, and stopped. Imports no torch."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from relibra.errors import EngineError

POLL_SECONDS = 0.2
STOPPING_SECONDS = 15.0
"""How long a server may take to end, before it is killed."""
LAST_LINES = 15
"""Lines of its log that say why a server did not start."""
ERROR = "error: "
"""How the sentence of an error of `relibra` begins."""
_ADDRESS = re.compile(r"at (http://[^\s/]+:\d+)/v1 ")


class ServerProcess:
    """A server that ends when its standard input ends: with this process, which alone holds the other end."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start it; log receives what it prints, after what an earlier one printed."""
        self.log = log
        with log.open("ab") as output:
            self._printed = output.tell()
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )

    def wait_for_address(self, seconds: float) -> str | None:
        """Return the address when the server takes requests; None: not within so many seconds.

        raises   EngineError, with the end of what it printed, where it ended
        """
        deadline = time.monotonic() + seconds
        while True:
            over = self._process.poll() is not None
            url = self._find_address()
            if url is not None:
                return url
            if over:
                raise EngineError(f"the rollout server ended; {self.end_of_log()}")
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_SECONDS)

    def wait_for_end(self, seconds: float) -> int | None:
        """Return the exit code of the server; None: it did not end within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end_of_log(self, lines: int = LAST_LINES) -> str:
        """Return the last lines that the server printed, in one; of `relibra` itself the sentence of its error.

        Not the path: the folder of a run without a step is removed, and its log with it.
        """
        printed = [line.strip() for line in self._log_text().splitlines() if line.strip()]
        sentence = next((line for line in reversed(printed) if line.startswith(ERROR)), None)
        return f"it printed last: {sentence.removeprefix(ERROR) if sentence else ' | '.join(printed[-lines:])}"

    def stop(self) -> None:
        """End the server: its standard input ends; it is killed where it stays."""
        assert self._process.stdin is not None, "it was started with a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if self.wait_for_end(STOPPING_SECONDS) is None:
            self._process.kill()
            self._process.wait()

    def _find_address(self) -> str | None:
        found = _ADDRESS.search(self._log_text())
        return found and found.group(1)

    def _log_text(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._printed)
            return file.read().decode(errors="replace")
