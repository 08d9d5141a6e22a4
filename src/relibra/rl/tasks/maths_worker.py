"""The child process of `maths.MathsJudge`: questions as JSON lines in, one byte per answer out.

`r`: ready for questions. Then for each `1`: right; `0`: not right; `?`: the library reads nothing in the right answer.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

LIBRARY_SECONDS = 2
"""The library's own limit for each of its steps."""
MEMORY_BYTES = 4 << 30


def main() -> None:
    """Answer until there are no more questions."""
    logging.disable()  # the library tells of every response it cannot read
    answers = os.dup(1)
    os.dup2(2, 1)  # nothing that is printed may pass for an answer
    with suppress(ValueError, OSError):  # the system may not know this limit, or have a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.write(answers, b"r")
    for line in sys.stdin.buffer:
        question = json.loads(line)
        os.write(answers, verdict(question["answer"], question["response"]))


def verdict(answer: str, response: str) -> bytes:
    """Return the byte for one question."""
    gold = parsed_answer(answer)
    if not gold:
        return b"?"
    read = parse(response, parsing_timeout=LIBRARY_SECONDS)
    return b"1" if verify(gold, read, timeout_seconds=LIBRARY_SECONDS) else b"0"


@lru_cache(maxsize=64)
def parsed_answer(answer: str) -> list[Any]:
    """Return what the library reads in a right answer; bare LaTeX is put where it looks for LaTeX."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    return list(parse(marked, parsing_timeout=LIBRARY_SECONDS))


if __name__ == "__main__":
    main()
