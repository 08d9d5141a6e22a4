"""A whole HTML page from a template: script, style and data in one file that allows no network request.

It can be mailed, archived and opened offline. Templates escape every value; what they mark `safe` is made here.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import relibra
from relibra.errors import ConfigError
from relibra.files import write_text
from relibra.printable import plural
from relibra.reporting.data.number_format import count, exact_percent, percent, times
from relibra.reporting.html.route_figures import plotly_script
from relibra.simulation.units import format_seconds

_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
"""What a browser lets the page do: run these scripts, no others, and send no request."""


def write_page(output: Path, page: str) -> Path:
    """Write a page, whole or not at all, and return where; raises ConfigError when it cannot be written."""
    try:
        write_text(output, page)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {output} ({error.strerror or error}): name another file with --output"
        ) from error
    return output


def render_page(body: str, **values: Any) -> str:
    """Return a whole page with the scripts and the style in it; plotly's script has 5 MB.

    body      template of what stands between header and footer
    values    of the templates; `page.html` needs `title`, `kind`, `headline` and `facts`
    """
    texts = ["\n" + re.sub("\r\n?", "\n", text) for text in (plotly_script(), _asset("page.js"))]  # as browsers parse
    policy = _POLICY.format(scripts=" ".join(map(_source_of, texts)))
    return render("page.html", body=body, scripts=texts, policy=policy, style=_asset("page.css"), **values)


def render(template: str, **values: Any) -> str:
    """Return a template with its values; lone surrogates, which UTF-8 cannot encode, are replaced."""
    return re.sub(r"[\ud800-\udfff]", "\ufffd", templates().get_template(template).render(**values))


@cache
def templates() -> Environment:
    """Return the environment of all templates; the macros of elements.html are known in each."""
    environment = Environment(
        loader=PackageLoader("relibra.reporting.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    filters = (count, exact_percent, percent, plural, times, plotly_json)
    environment.filters |= {item.__name__: item for item in filters} | {"duration": format_seconds}
    environment.globals["relibra_version"] = relibra.__version__
    elements = environment.get_template("elements.html").module
    environment.globals |= {name: macro for name, macro in vars(elements).items() if not name.startswith("_")}
    return environment


def plotly_json(figure: Any) -> Markup:
    """Return a plotly figure as JSON for a script element; no text in it can end the element."""
    return Markup(figure.to_json().replace("<", "\\u003c"))


def _source_of(script: str) -> str:
    """Return the hash by which a policy allows a script."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    text = files("relibra.reporting.html").joinpath(name).read_text(encoding="utf-8")
    assert not re.search(r"</(script|style)", text), f"{name} would end its own element"
    return text
