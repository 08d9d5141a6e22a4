"""Small line panels over layers as SVG: no script, stretched to any width, each curve with its own dashes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from jaxtyping import Float64
from numpy import ndarray

CURVES = ("before", "after", "third")
"""Classes of the style sheet, in the order of the curves: colour and dashes."""


def line_panel(
    title: str,
    layer_ids: Sequence[int],
    curves: Sequence[tuple[str, Float64[ndarray, " L"]]],
    *,
    unit: str,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Return a panel with one line per curve over the layers, and the ends of both axes.

    unit        how a figure of the axis is written: "%" for shares, else what stands behind it
    low, high   ends of the axis; None: those of the curves, with 0 if they come near
    """
    values = [float(v) for _, curve in curves for v in curve]
    least, most = min(values), max(values)
    low = (0.0 if least < 0.5 * most else least - 0.08 * (most - least)) if low is None else low
    high = most + 0.06 * (most - low) if high is None else high
    high = min(1.0, high) if unit == "%" else high
    span = (high - low) or 1.0
    last = max(1, len(layer_ids) - 1)
    paths = []
    for kind, (name, curve) in zip(CURVES, curves, strict=False):
        points = [(100 * i / last, 100 - 100 * (float(v) - low) / span) for i, v in enumerate(curve)]
        if len(points) == 1:
            points.append((100.0, points[0][1]))
        path = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
        paths.append(
            f'<path class="{kind}" d="{path}" vector-effect="non-scaling-stroke"><title>{escape(name)}</title></path>'
        )
    last_layer = f"layer {layer_ids[-1]}" if len(layer_ids) > 1 else ""
    frame = '<path class="frame" d="M0 0V100H100" vector-effect="non-scaling-stroke"/>'
    words = "; ".join(f"{name}: {_write(float(c.min()), unit)} to {_write(float(c.max()), unit)}" for name, c in curves)
    return (
        f'<figure class="panel"><figcaption>{escape(title)}</figcaption>'
        f'<div class="axis"><span>{_write(high, unit)}</span><span>{_write(low, unit)}</span></div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(title)} over layers. '
        f'{escape(words)}">{frame}{"".join(paths)}</svg>'
        f'<div class="axis-x"><span>layer {layer_ids[0]}</span><span>{last_layer}</span></div></figure>'
    )


def line_legend(names: Sequence[str]) -> str:
    """Return what the curves of panels mean."""
    items = "".join(
        f'<li><svg viewBox="0 0 30 8" aria-hidden="true"><path class="{kind}" d="M0 4H30"/></svg>{escape(name)}</li>'
        for kind, name in zip(CURVES, names, strict=False)
    )
    return f'<ul class="legend">{items}</ul>'


def _write(value: float, unit: str) -> str:
    return f"{100 * value:.3g} %" if unit == "%" else f"{value:.3g} {unit}".strip()
