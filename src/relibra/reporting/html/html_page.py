"""A whole HTML page: script, style and data in one file that allows no network request.

It can be mailed, archived and opened offline.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path

import relibra
from relibra.errors import ConfigError
from relibra.files import write_text
from relibra.reporting.html.html import paragraph
from relibra.reporting.html.route_figures import plotly_script

_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
"""What a browser lets the page do: run these scripts, no others, and send no request."""


def check_output(output: Path) -> None:
    """Raise a ConfigError when the place for a page is a folder, or cannot be read."""
    with _file_errors(output):
        if output.is_dir():
            raise ConfigError(f"the report cannot be written to {output}, which is a folder: name an .html file in it")


def write_page(output: Path, page: str) -> Path:
    """Write a page, whole or not at all, and return where; raises ConfigError when it cannot be written."""
    with _file_errors(output):
        write_text(output, page)
    return output


@contextmanager
def _file_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {output} ({error.strerror or error}): name another file with --output"
        ) from error


def html_page(
    name: str, kind: str, headline: str, body: str, footer: str, *, scripts: Sequence[str], plotly: bool = False
) -> str:
    """Return a whole page with its scripts and style in it.

    name, kind, headline   plain text
    body, footer                 trusted HTML
    scripts                      files of this package, in order
    plotly                       the body holds figures of plotly (`html.plot`), whose script has 5 MB
    """
    texts = [_as_parsed(text) for text in (*([plotly_script()] if plotly else []), *map(_asset, scripts))]
    code = "\n".join(f"<script>{text}</script>" for text in texts)
    policy = _POLICY.format(scripts=" ".join(map(_source_of, texts)) or "'none'")
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
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
{paragraph(headline, "verdict") if headline else ""}
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
    return re.sub(r"[\ud800-\udfff]", "\ufffd", page)  # lone surrogates of a name, which UTF-8 cannot encode


def _as_parsed(text: str) -> str:
    """Return a script as a browser reads it from a page: with line feeds only."""
    return "\n" + text.replace("\r\n", "\n").replace("\r", "\n")


def _source_of(script: str) -> str:
    """Return the hash by which a policy allows a script."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    text = files("relibra.reporting.html").joinpath(name).read_text(encoding="utf-8")
    assert not re.search(r"</(script|style)", text), f"{name} would end its own element"
    return text
