"""The child process of `maths.MathsJudge`: JSON lines in, one byte per answer out.

`r`: ready. Then for each line `1`: equal; `0`: not equal; `?`: the library cannot parse the correct answer.
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
"""Seconds that the library allows for each of its steps."""
MEMORY_BYTES = 4 << 30


def main() -> None:
    """Answer until stdin ends."""
    logging.disable()  # the library logs every response that it cannot parse
    answers = os.dup(1)
    os.dup2(2, 1)  # so that printed text is no answer
    with suppress(ValueError, OSError):  # the system may not support this limit, or has a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.write(answers, b"r")
    for line in sys.stdin.buffer:
        question = json.loads(line)
        os.write(answers, verdict(question["answer"], question["response"]))


def verdict(answer: str, response: str) -> bytes:
    """Return the answer byte of one response."""
    gold = parsed_answer(answer)
    if not gold:
        return b"?"
    read = parse(response, parsing_timeout=LIBRARY_SECONDS)
    return b"1" if verify(gold, read, timeout_seconds=LIBRARY_SECONDS) else b"0"


@lru_cache(maxsize=64)
def parsed_answer(answer: str) -> list[Any]:
    """Return the parsed correct answer; bare LaTeX is put into \\boxed, where the library looks for it."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    return list(parse(marked, parsing_timeout=LIBRARY_SECONDS))


if __name__ == "__main__":
    main()
