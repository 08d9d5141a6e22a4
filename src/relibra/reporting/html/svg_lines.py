"""Small line panels over layers as SVG: no script, stretched to any width, each curve with its own dashes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from jaxtyping import Float64
from numpy import ndarray

CURVES = ("before", "after", "third")
"""Classes of the style sheet, in the order of the curves: colour and dashes."""


def line_panel(title: str, layer_ids: Sequence[int], curves: Sequence[tuple[str, Float64[ndarray, " L"]]]) -> str:
    """Return a panel of shares of one over the layers, one line per (name, share); the axis begins at 0."""
    high = min(1.0, 1.06 * max(float(share_L.max()) for _, share_L in curves)) or 1.0
    last = max(1, len(layer_ids) - 1)
    paths = []
    for kind, (name, curve) in zip(CURVES, curves, strict=False):
        points = [(100 * i / last, 100 - 100 * float(v) / high) for i, v in enumerate(curve)]
        if len(points) == 1:
            points.append((100.0, points[0][1]))
        path = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
        paths.append(
            f'<path class="{kind}" d="{path}" vector-effect="non-scaling-stroke"><title>{escape(name)}</title></path>'
        )
    last_layer = f"layer {layer_ids[-1]}" if len(layer_ids) > 1 else ""
    frame = '<path class="frame" d="M0 0V100H100" vector-effect="non-scaling-stroke"/>'
    words = "; ".join(f"{name}: {_percent(c.min())} to {_percent(c.max())}" for name, c in curves)
    return (
        f'<figure class="panel"><figcaption>{escape(title)}</figcaption>'
        f'<div class="axis"><span>{_percent(high)}</span><span>0 %</span></div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(title)} over layers. '
        f'{escape(words)}">{frame}{"".join(paths)}</svg>'
        f'<div class="axis-x"><span>layer {layer_ids[0]}</span><span>{last_layer}</span></div></figure>'
    )


def line_legend(names: Sequence[str]) -> str:
    """Return the legend of the curves of panels."""
    items = "".join(
        f'<li><svg viewBox="0 0 30 8" aria-hidden="true"><path class="{kind}" d="M0 4H30"/></svg>{escape(name)}</li>'
        for kind, name in zip(CURVES, names, strict=False)
    )
    return f'<ul class="legend">{items}</ul>'


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
