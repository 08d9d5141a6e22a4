"""What can go wrong for a user, as one small tree.

    RelibraError
      TraceError     a routing trace is damaged, incomplete, or does not fit the model or the batch
      PlanError      a plan breaks a rule, or cannot be made under the given budget
      ConfigError    a setting is unknown, out of range, or contradicts another one
      ClusterError   a cluster description is impossible, or does not fit the job
      EngineError    a rollout engine, a model or a process did something we cannot go on from
        LostPeerError    a peer ended or did not answer in time: the cause lies there

Each message is one sentence made of fields: what, got, where, allowed, next step. Broken beliefs about our own code are
`assert`s.
`library_errors` turns errors of other libraries into ours; `missing_packages` says how to install what an import lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relibra.printable import cut_middle, excerpt

INSTALL_TRAINING = "install torch (choose its build), then, in the checkout, pip install -e '.[train]'"
"""What to do where a package is missing that only training needs."""
LONGEST_MESSAGE = 2000
"""Characters; the middle of a longer message, which quotes a file, is left out."""
LONGEST_VALUE = 160
"""Characters of a refused value in a message."""


class RelibraError(Exception):
    """Root of every error that relibra raises on purpose: a whole sentence, or its parts.

    what        the wrong setting, file or value, by its name; or the whole sentence
    got         the value that is refused; None: `what` says it
    where       place where it was given
    allowed     values that are accepted, or why this one is not
    next_step   what the user may do

    >>> str(RelibraError("run.steps", got=-1, where="run.toml", allowed="0 or more", next_step="set run.steps=0"))
    'run.steps, got -1 (in run.toml): 0 or more; set run.steps=0'
    """

    def __init__(
        self, what: str = "", *, got: object = None, where: str = "", allowed: str = "", next_step: str = ""
    ) -> None:
        self.what, self.got, self.where, self.allowed, self.next_step = what, got, where, allowed, next_step
        subject = what + (f", got {excerpt(got, LONGEST_VALUE)}" if got is not None else "")
        subject += f" (in {where})" if where else ""
        advice = "; ".join(filter(None, (allowed, next_step)))
        super().__init__(": ".join(filter(None, (subject, advice))))

    def __str__(self) -> str:
        return cut_middle(super().__str__(), LONGEST_MESSAGE)


class TraceError(RelibraError, ValueError):
    """A routing trace is damaged, incomplete, or does not fit the model or the batch."""


class PlanError(RelibraError, ValueError):
    """A plan breaks a rule, or cannot be made under the given budget."""


class ConfigError(RelibraError, ValueError):
    """A setting is unknown, out of range, or contradicts another one; `causes`: several such errors at once."""

    causes: tuple[ConfigError, ...] = ()


class ClusterError(RelibraError, ValueError):
    """A cluster description is impossible, or does not fit the job."""


class EngineError(RelibraError, RuntimeError):
    """A rollout engine, a model or a process did something we cannot go on from."""


class LostPeerError(EngineError):
    """A peer ended, or did not answer within parallel.timeout_seconds: the cause lies there, not in this process."""


_OURS = ("relibra", "__main__")


@contextmanager
def library_errors(
    stage: str, kind: type[RelibraError], *, stays: Callable[[Exception], bool] = lambda _: False
) -> Iterator[None]:
    """Turn an error that a library raises inside into one of ours, which names the stage and the library.

    An error that a line of relibra raises is a bug, and not changed. RELIBRA_TRACEBACK=1 prints both tracebacks.

    stage   begins the message
    stays   predicate: errors re-raised unchanged
    """
    try:
        yield
    except RelibraError:
        raise
    except Exception as error:
        library = raised_by(error)
        if library is None or stays(error):
            raise
        raise kind(
            f"{stage}: {library} raised {in_a_line(error)}; RELIBRA_TRACEBACK=1 in the environment shows where"
        ) from error


@contextmanager
def missing_packages(needed_by: str, install: str = INSTALL_TRAINING) -> Iterator[None]:
    """Say what to install where an import inside lacks a package, such as torch.

    needed_by   command, module or name of relibra that needs the package
    install     what to do where a package is missing
    raises      ModuleNotFoundError with that sentence; one about a module of relibra is a bug and stays as it is
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "relibra").partition(".")[0]
        if package == "relibra":
            raise
        raise ModuleNotFoundError(
            f"{needed_by} needs the package {package!r}, which is not installed: {install}", name=error.name
        ) from error


def raised_by(error: BaseException) -> str | None:
    """Return the library that raised an error, or defines its type; None: a line of relibra raised a built-in type."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "__main__" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    names = (module.partition(".")[0], type(error).__module__.partition(".")[0])
    return next((name for name in names if name not in (*_OURS, "builtins")), None)


def in_a_line(error: BaseException, longest: int = 300) -> str:
    """Return type and first line of an error.

    >>> in_a_line(ValueError("no idea\\nat all"))
    'ValueError: no idea'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:longest]}" if lines else type(error).__name__
