"""The child process of `maths.MathsJudge`: JSON lines in, one byte per answer out.

`r`: ready. Then for each line `1`: equal; `0`: not equal; `?`: the library cannot parse the correct answer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

from math_verify import grader, parse, verify

from relibra.rl.tasks.maths_numbers import equal_numbers
from relibra.rl.tasks.maths_text import HALF_OF_DAY, last_box, readable, readable_answer

LIBRARY_SECONDS = 2
"""Seconds that the library allows for each of its steps."""
MEMORY_BYTES = 4 << 30

assert callable(grader.sympy_numeric_eq), "the library compares numbers in this function"
grader.sympy_numeric_eq = equal_numbers


def main() -> None:
    """Answer until stdin ends."""
    logging.disable()  # the library logs every response that it cannot parse
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    with suppress(ValueError, OSError):  # the system may not support this limit, or has a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.write(answers, b"r")
    for line in sys.stdin.buffer:
        question = json.loads(line)
        os.write(answers, verdict(question["answer"], question["response"]))


def verdict(answer: str, response: str) -> bytes:
    """Return the answer byte of one response; its last box is its answer, if it has one."""
    gold = parsed_answer(answer)
    if not gold:
        return b"?"
    box = last_box(response)
    times = [HALF_OF_DAY.fullmatch(one) for one in (last_box(answer) or answer, box or "")]
    if box == "" or len({time[1].lower() for time in times if time}) == 2:  # the library drops am and pm
        return b"0"
    text = readable(response) if box is None else f"\\boxed{{{readable_answer(box)}}}"
    read = parse(text, parsing_timeout=LIBRARY_SECONDS)
    return b"1" if verify(gold, read, timeout_seconds=LIBRARY_SECONDS, allow_set_relation_comp=True) else b"0"


@lru_cache(maxsize=64)
def parsed_answer(answer: str) -> list[Any]:
    """Return the parsed correct answer; bare LaTeX is put into \\boxed, where the library looks for it."""
    text = readable_answer(last_box(answer) or answer)
    marked = text if re.search(r"(?<!\\)\$", text) else f"\\boxed{{{text}}}"
    return list(parse(marked, parsing_timeout=LIBRARY_SECONDS))


if __name__ == "__main__":
    main()
