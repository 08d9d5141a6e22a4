r"""Text of mathematical answers: the last `\boxed{}` of a response, and numbers as Math-Verify reads them."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_BOX = re.compile(r"\\boxed(?![a-zA-Z])|\\fbox(?![a-zA-Z])|(?<![a-zA-Z\\])boxed(?=\s*\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SIGNS = {"−": "-", "–": "-", "⁄": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div "}
_SIGNS |= {"√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup "}
_SIGNS |= {"±": r"\pm ", "∅": r"\emptyset ", "°": r"^\circ ", **dict.fromkeys("€£¥₹₩₽", "")}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_THIN = r"(?:\\[,;:! ]|\\thinspace\s*|~|\{[ ,]\}|\{\\,\}|,\\!|[\u00a0\u2009\u202f])"
"""Space, or a comma, between groups of three digits and nowhere else."""
_GROUPS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_THIN}\d{{3}})+(?!\d)")
_SMALL_GROUPS = re.compile(rf"(?<=\d\.)\d{{3}}(?:{_THIN}\d{{1,3}})+(?!\d)")
_LOOSE_GROUPS = re.compile(r"(?<![\d.,_' ])\d{1,3}(?:([ _'])\d{3})(?:\1\d{3})*(?! ?\d|/)")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,3})(?![\w.]*\w)")
_LIST = re.compile(r"[(\[{](?!\d{3}(?:,\s*\d{3})*\\?[)\]}])[^()\[\]{}]*,\s[^()\[\]{}]*[)\]}]")
_MIXED = re.compile(r"(-?\d{1,99})\s+(\d{1,99})/(\d{1,99})(?:\s*\\text\s*\{(?!\s*perc)[^{}]*\})?")
_FUNCTION = re.compile(r"(?<![A-Za-z\\{])(?=(?:sin|cos|tan|log|ln)\b)")
_UNIT = r"[A-Za-z]{3,}|[cmk]m|[km]g|m[lLi]|ft|in|lb|oz|hr|of|[ap]m|[AP]M"
"""A word, or an abbreviation: other letters may be a product."""
_COUNTED = re.compile(
    r"\\?\$?([-+]?(?:\d+\s+\d+/\d+|\\[dt]?frac\{\d+\}\{\d+\}|[\d.,]*\d(?:/\d+| \\times 10\^\{\d+\})?))"
    rf"(?:\s+(?!(?:and|mod|base|percent|pct|exp|sqrt|abc|xyz)\b)(?:{_UNIT})\b(?:\s+(?:a|[A-Za-z]{{2,}}))*"
    rf"|\s*(?:{_UNIT}|m|g|L)/(?:{_UNIT}|s|h|L|m))"
)
_REPEATING = re.compile(r"(\d{0,99})\.(\d{0,99})\\(?:overline|bar|dot)\s*\{?(\d{1,99})\}?")
_DOTS = re.compile(r"\\dot\s*\{?(\d)\}?(\d{0,97})\\dot\s*\{?(\d)\}?")
_LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE_NAME = re.compile(rf"(?<=\d)\s*(?:(\\text\s*\{{\s*)|\\ )?({'|'.join(_LARGE)})\b(?(1)[^{{}}]*\}})")
HALF_OF_DAY = re.compile(r"\W*[\d:]+\W*(?:(?:text|mathrm)\W*)?([ap])\.?\s*m\W*", re.IGNORECASE)
"""A text that is a time and nothing else (`fullmatch`); the group is the a of am or the p of pm."""


def last_box(text: str) -> str | None:
    r"""Return what the last `\boxed` of a text holds, and a `\%` behind it; empty: it is cut off; None: there is none.

    >>> last_box(r"\boxed{1} or $\boxed{\frac{1}{2}}$"), last_box(r"\boxed{42}, or \boxed{\frac{1}{2}"), last_box("42")
    ('\\frac{1}{2}', '', None)
    """
    boxes = [*_BOX.finditer(text)]
    if not boxes:
        return None
    rest = text[boxes[-1].end() :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split("\n")[0].partition(" ")[0]
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            percent = re.match(r"\s*\\?%", rest[brace.end() :])
            return rest[1 : brace.start()].strip() + (r"\%" if percent else "")
    return ""


def readable(text: str) -> str:
    r"""Return a text in which signs are commands of LaTeX, and numbers have no thin spaces or exponents.

    >>> readable(r"it is 1\,000\,000, or 1.5e3; 2½ × 3²")
    'it is 1000000, or 1500; 2 1/2 \\times  3^{2}'
    """
    text = re.sub(r"[⁻⁰¹²³⁴-⁹]+", lambda raised: f"^{{{raised[0].translate(_RAISED)}}}", text)
    text = re.sub(r"[\u00bc-\u00be\u2150-\u215e]", lambda one: f" {unicodedata.normalize('NFKC', one[0])}", text)
    text = "".join(_SIGNS.get(sign, sign) for sign in text)
    text = re.sub(r"</?answer>", " ", text)
    for groups in (_GROUPS, _SMALL_GROUPS):
        text = groups.sub(lambda number: re.sub(_THIN, "", number[0]), text)
    return _EXPONENT.sub(lambda number: format(Decimal(number[0]), "f"), text)


def readable_answer(text: str) -> str:
    r"""Return `readable` of a text that is an answer and nothing else.

    >>> [readable_answer(text) for text in ("12 345", "(1,000, 2,000)", "18 dollars.", "2 1/2")]
    ['12345', '(1000, 2000)', '18', '\\frac{5}{2}']
    """
    text = re.sub(r"\\(?:text)?color\s*\{[^{}]*\}|\\underline(?=\s*\{)", "", readable(text)).strip()
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text) if re.fullmatch(r"\\text\s*\{\s*\d[^{}]*\}", text) else text
    text = text.replace(r"\varnothing", r"\emptyset").replace("~", " ")
    text = re.sub(r"(?<!\\ldots)(?<!\\right)(?<![.\\])[.,;:]+$", "", text)
    text = _LOOSE_GROUPS.sub(lambda number: re.sub(r"[ _']", "", number[0]), text)
    text = _LIST.sub(lambda listed: re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", listed[0]), text)
    text = _LARGE_NAME.sub(lambda name: rf" \times 10^{{{_LARGE[name[2]]}}}", _FUNCTION.sub(r"\\", text))
    if counted := _COUNTED.fullmatch(text):
        text = counted[1]
    if mixed := _MIXED.fullmatch(text):
        whole, top, bottom = map(int, mixed.groups())
        return rf"\frac{{{whole * bottom + (-top if mixed[1].startswith('-') else top)}}}{{{bottom}}}"
    return _REPEATING.sub(lambda decimal: _as_fraction(*decimal.groups()), _DOTS.sub(r"\\overline{\1\2\3}", text))


def _as_fraction(whole: str, places: str, repeating: str) -> str:
    """Return a decimal whose last digits repeat as a fraction."""
    top = int(whole + places + repeating) - int(whole + places or "0")
    return rf"\frac{{{top}}}{{{(10 ** len(repeating) - 1) * 10 ** len(places)}}}"
