"""Elements that sections are made of. Arguments named `html` are trusted, all other text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any


def section(identifier: str, title: str, *html: str) -> str:
    """Return a section with a heading; links and screen readers find it by its identifier."""
    body = "\n".join(piece for piece in html if piece)
    return (
        f'<section id="{identifier}" aria-labelledby="{identifier}-title">\n'
        f'<h2 id="{identifier}-title">{escape(title)}</h2>\n{body}\n</section>'
    )


def paragraph(text: str, kind: str = "") -> str:
    """Return one paragraph; `kind` is a class of the style sheet."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(sentences: Sequence[str], kind: str = "") -> str:
    """Return a list of sentences; `kind` is a class of the style sheet."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>'


def plot(identifier: str, figure: Any, alternative: str) -> str:
    """Return a plotly figure with its text alternative.

    The figure is held as JSON and drawn by page.js. `<` is escaped: no text in it can end the script element.
    """
    height = figure.layout.height
    data = figure.to_json().replace("<", "\\u003c")
    return (
        f'<figure><div class="plot" id="{identifier}" data-figure="{identifier}-figure" role="img" '
        f'aria-label="{escape(alternative)}" style="min-height:{height}px"></div></figure>\n'
        f'<script type="application/json" id="{identifier}-figure">{data}</script>'
    )


def selector(label: str, plot_identifier: str, options: Sequence[str]) -> str:
    """Return a labelled choice of which trace of a plot is visible; nothing where there is no choice."""
    if len(options) < 2:
        return ""
    items = "".join(f'<option value="{i}">{escape(option)}</option>' for i, option in enumerate(options))
    return f'<label>{escape(label)} <select data-plot="{plot_identifier}">{items}</select></label>'


def slider(identifier: str, label: str, last: int, value: int = 0) -> str:
    """Return a labelled slider, which arrow keys move by one; its output is filled by a script."""
    ends = f'min="0" max="{max(0, last)}" value="{value}"'
    return (
        f'<label class="slider">{label} <output id="{identifier}-value" for="{identifier}"></output>'
        f'<input type="range" id="{identifier}" {ends} autocomplete="off"></label>'
    )


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[int]) -> str:
    """Return a table; columns hold numbers, set flush right, unless named in `text_columns`."""
    kinds = ["name" if i in text_columns else "number" for i in range(len(header))]
    head = "".join(f'<th scope="col" class="{k}">{escape(text)}</th>' for k, text in zip(kinds, header, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f'<td class="{k}">{escape(cell)}</td>' for k, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, *html: str) -> str:
    """Return what a reader may unfold."""
    return f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(html) + "</details>"


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Return (label, value, note) cards."""
    html = "".join(
        f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd><dd class="note">{escape(note)}</dd></div>'
        for label, value, note in items
    )
    columns = len(items) if len(items) in (3, 6) else 4  # full rows on a wide screen
    return f'<dl class="cards" style="--columns: {columns}">{html}</dl>'


def definitions(items: Sequence[tuple[str, str]]) -> str:
    """Return a list of terms and what they mean."""
    pairs = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in items)
    return f'<dl class="glossary">{pairs}</dl>'
