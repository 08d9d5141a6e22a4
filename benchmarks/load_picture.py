"""The picture of the README: skew of a recorded model's ranks under four systems, drawn from result rows as SVG.

`relibra bench render` writes it to docs/skew.svg.
"""

from collections.abc import Mapping, Sequence

from benchmarks.harness.results_files import Row

SYSTEMS: Mapping[str, tuple[str, str]] = {
    "static": ("static layout", "#9aa0a6"),
    "eplb": ("EPLB", "#d9a441"),
    "ultraep": ("UltraEP", "#5b8bd0"),
    "relibra_paper_tokens": ("relibra, even tokens", "#1b8a5a"),
}
"""Balancer in the rows -> label and colour, in the order of the bars."""

TITLE = "Tokens of the busiest rank / tokens of the mean rank: gpt-oss-20b, recorded routes, one spare slot per rank"
RANKS = ("8 ranks", "16 ranks", "32 ranks")
_WIDTH, _LABELS, _BAR, _GAP, _TOP = 860, 190, 17, 16, 64


def draw_skew(rows: Sequence[Row]) -> str:
    """Return an SVG with one bar per system and number of ranks; each bar is labelled with the figure of its row.

    rows    of balancers_gpt_oss.json: one row per balancer, with its skew under the keys in RANKS
    """
    row_of = {row["balancer"]: row for row in rows}
    largest = max(row_of[name][ranks] for name in SYSTEMS for ranks in RANKS)
    scale = (_WIDTH - _LABELS - 70) / largest
    lines, y = [], _TOP
    for ranks in RANKS:
        lines.append(_text(20, y + 2.6 * _BAR, ranks, "bold"))
        for name, (label, colour) in SYSTEMS.items():
            skew = row_of[name][ranks]
            lines.append(_text(_LABELS - 8, y + 13, label, anchor="end"))
            lines.append(
                f'<rect x="{_LABELS}" y="{y}" width="{skew * scale:.1f}" height="{_BAR - 3}" fill="{colour}"/>'
            )
            lines.append(_text(_LABELS + skew * scale + 6, y + 12, f"{skew:.2f}", "bold"))
            y += _BAR
        y += _GAP
    even = _LABELS + scale
    lines.append(
        f'<line x1="{even:.1f}" y1="{_TOP - 8}" x2="{even:.1f}" y2="{y - 8}" stroke="#333" stroke-dasharray="4 3"/>'
    )
    lines.append(_text(even, _TOP - 14, "1 = all ranks equal", anchor="middle"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<title>{TITLE}</title>",
            f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>',
            _text(20, 24, TITLE, "bold"),
            *lines,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, words: str, weight: str = "normal", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}" fill="#222">{words}</text>'
