"""A whole HTML page from its pieces: script, style and data in one file that forbids itself any network request.

So it can be mailed, archived and opened offline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from importlib.resources import files
from pathlib import Path

import relibra
from relibra.errors import ConfigError
from relibra.reporting.html.html import paragraph
from relibra.reporting.html.route_figures import plotly_script

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def refuse_folder(output: Path) -> None:
    """Raise a ConfigError when the place for a page is a folder."""
    if output.is_dir():
        raise ConfigError(f"the report cannot be written to {output}, which is a folder: name an .html file in it")


@contextmanager
def place_problems(output: Path) -> Iterator[None]:
    """Tell what the file system says of the place for the report in one sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {output} ({error.strerror or error}): name another file with --output"
        ) from error


def html_page(
    name: str, kind: str, first_sentence: str, body: str, footer: str, *, scripts: Sequence[str], plotly: bool = False
) -> str:
    """Return a whole page with its scripts and style in it.

    name, kind, first_sentence   plain text
    body, footer                 trusted HTML
    scripts                      files of this package, in order
    plotly                       the body holds figures of plotly (`elements.plot`), which is 5 MB
    """
    texts = [*([plotly_script()] if plotly else []), *map(_asset, scripts)]
    code = "\n".join(f"<script>\n{text}</script>" for text in texts)
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="relibra {relibra.__version__}">
<title>{escape(name)}: {escape(kind)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
</head>
<body>
<header>
<p class="kicker">relibra {escape(kind)}</p>
<h1>{escape(name)}</h1>
{paragraph(first_sentence, "verdict")}
</header>
<main>
{body}
</main>
<footer>{footer}</footer>
<noscript><p class="notice">The figures need JavaScript; the sentences and tables do not.</p></noscript>
{code}
</body>
</html>
"""
    return re.sub(r"[\ud800-\udfff]", "\ufffd", page)  # halves of characters in a name: no file can hold them


def _asset(name: str) -> str:
    text = files("relibra.reporting.html").joinpath(name).read_text(encoding="utf-8")
    assert not re.search(r"</(script|style)", text), f"{name} would end its own element"
    return text
