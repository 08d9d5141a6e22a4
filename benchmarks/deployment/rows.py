"""Rows of this folder: what a case gives, what it has to, and what the paper says."""

from __future__ import annotations

from relibra.planning.deployment.accelerator import ACCELERATORS, Accelerator
from relibra.planning.deployment.served_model import PAPER_MODELS, ServedModel
from relibra.planning.deployment.service_level import ServiceLevel

SEED = 0
LEVEL = ServiceLevel(seconds_per_token=0.15, context=650)
MODELS: dict[str, ServedModel] = PAPER_MODELS
GPUS: dict[str, Accelerator] = ACCELERATORS
PAIRS = (("a800", "a800"), ("h20", "l40s"))
"""Accelerators of attention and of experts in the paper's two set-ups."""
BASIS = "650 tokens of context, at most 150 ms per token"


def row(
    table: str,
    case: str,
    value: float | str,
    *,
    label: str,
    unit: str,
    test: int | str = "",
    least: float | None = None,
    most: float | None = None,
    cited: str = "",
    configuration: str = "",
    **more: object,
) -> dict:
    """Return a row; `ok` says whether the value lies between `least` and `most`, and is empty without both."""
    judged = least is not None or most is not None
    inside = isinstance(value, int | float) and (least or 0) <= value <= (most if most is not None else float("inf"))
    return {
        "case": case, "table": table, "test": test, "label": label, "seed": SEED, "repetitions": 1, "value": value,
        "goal": _goal(least, most), "ok": ("yes" if inside else "NO") if judged else "", "cited": cited, "unit": unit,
        "configuration": configuration, **more,
    }  # fmt: skip


def _goal(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    return f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else ""
