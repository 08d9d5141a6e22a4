"""Equality of numbers for Math-Verify: exact where both are exact, and relative to their size elsewhere.

The library rounds both to six digits behind the point, and drops what is below 1e-15: all tiny numbers are equal then.
"""

from __future__ import annotations

from typing import Any

from sympy import Float, Mul, Rational, UnevaluatedExpr, simplify
from sympy.matrices import MatrixBase

LEAST_DIGITS = 6
"""A decimal with so many digits, and places behind the point, may stand for an endless one, such as 1/3."""
_DIGITS = 30
"""Digits with which numbers that are no fractions, such as roots, are compared."""
_HUNDREDTH = UnevaluatedExpr(Rational(1, 100))


def equal_numbers(gold: Any, read: Any, float_rounding: int = 6, numeric_precision: int = 15) -> bool:  # noqa: ARG001
    """Return whether two expressions, or all entries of two matrices, have one value; takes the library's arguments."""
    if isinstance(gold, MatrixBase) or isinstance(read, MatrixBase):
        return getattr(gold, "shape", None) == getattr(read, "shape", 0) and all(map(equal_numbers, gold, read))
    try:
        percents = [_without_percent(one) for one in (gold, read)]
        if percents != [gold, read] and _exact(percents[0]) == _exact(percents[1]):
            return True  # 9% stands for 9, too
        a, b = _exact(gold), _exact(read)
        if a == b:
            return True
        if a.free_symbols or b.free_symbols:
            return bool((gold.has(Float) or read.has(Float)) and simplify(a - b) == 0)  # no decimals: the library does
        if _rounds_to(a, read) or _rounds_to(b, gold):
            return True
        if (a.is_Rational and b.is_Rational) or not (a.is_finite and b.is_finite):
            return False
        return bool(
            abs((a - b).evalf(_DIGITS)) <= max(abs(a.evalf(_DIGITS)), abs(b.evalf(_DIGITS))) / 10 ** (_DIGITS - 5)
        )
    except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError):  # infinite, or not a number
        return False


def _without_percent(one: Any) -> Any:
    """Return the number of percents, or an expression as it is."""
    return Mul(*(part for part in one.args if part != _HUNDREDTH)) if one.is_Mul and _HUNDREDTH in one.args else one


def _exact(one: Any) -> Any:
    """Return an evaluated expression whose decimals are fractions."""
    one = one.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))
    return one.doit()


def _rounds_to(number: Any, decimal: Any) -> bool:
    """Return whether a decimal is an endless number rounded to its digits, or any number rounded to a float."""
    if not isinstance(decimal, Float) or not number.is_real:
        return False
    value = Rational(str(decimal))
    places = next(n for n in range(400) if 10**n % value.q == 0)
    digits = len(str(abs(value.p) * 10**places // value.q))
    if places < LEAST_DIGITS or digits < LEAST_DIGITS:
        return False
    if 15 <= digits <= 17 and abs(number - value).evalf(_DIGITS) <= abs(value) / 2**51:  # printed from a float
        return True
    ends = number.is_Rational and 10**400 % number.q == 0
    return not ends and bool(abs(number - value).evalf(_DIGITS) <= Rational(1, 2 * 10**places))
