"""Text from elsewhere, such as names in files and messages of other programs, for a terminal: escapes are shown.

A terminal obeys escape sequences: raw, a name could move the cursor, change colours or hide what was printed before.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType


def printable(text: str) -> str:
    """Return a text in which control and other unprintable characters, also lone surrogates, are shown as escapes.

    >>> print(printable("a\x1b[31m \u00e9"))
    a\\x1b[31m \u00e9
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    r"""Return `printable` of each line of a text.

    >>> printable_lines("one\ntwo\r")
    'one\ntwo\\r'
    """
    return "\n".join(printable(line) for line in text.split("\n"))


def plural(count: int, noun: str) -> str:
    """Write a number with its noun.

    >>> plural(1, "micro-batch"), plural(2048, "token")
    ('1 micro-batch', '2,048 tokens')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def excerpt(value: object, longest: int = 80) -> str:
    """Return the `repr` of a value for a message, cut; its type where `repr` fails.

    >>> excerpt("a" * 100)[-6:]
    'aaa...'
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - nested too deeply, a number of thousands of digits, or a user's class
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def cut_middle(text: str, longest: int) -> str:
    """Leave out the middle of a text that is too long, and write how much that is.

    >>> cut_middle("a" * 5000 + "z", 40)
    'aaaaaaaaaaaaaaaaaaaaaaaaaa [... 4,965 characters left out ...] aaaaaaaaaz'
    """
    if len(text) <= longest:
        return text
    head, tail = 2 * longest // 3, longest // 4
    return f"{text[:head]} [... {len(text) - head - tail:,} characters left out ...] {text[-tail:]}"


class PrintableFormatter(logging.Formatter):
    """Formats log records, with what others wrote into them, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as printable lines."""
        return printable_lines(super().format(record))


def escape_logs_and_tracebacks() -> None:
    """Show escapes in warnings and errors that this process prints, unless the program set up logging itself."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    sys.excepthook = print_traceback


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback to stderr as Python does, with escapes shown."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable_lines(text), end="", file=sys.stderr, flush=True)
