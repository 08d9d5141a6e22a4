"""Right answers that a file has as numbers: their digits reach the judge, whatever type stored them."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import ConfigError
from relibra.rl.tasks.rewards import make_reward, right_answer
from relibra.rl.tasks.rows import WrittenFloat, open_rows
from relibra.rl.tasks.task import Prompt

EXACT = make_reward("exact", "answer")
WRITTEN = {
    "1e16": "10000000000000000",
    "0.00001": "0.00001",
    "1E-7": "0.0000001",
    "42.0": "42",
    "-0.50": "-0.50",
    "123456789012345678901234567890": "123456789012345678901234567890",
    "0.1234567890123456789": "0.1234567890123456789",
    "1e400": "1" + "0" * 400,
}


@pytest.fixture
def row_of(tmp_path):
    """Return a function from the text of a JSON number to its row."""

    def read(written):
        (tmp_path / "rows.jsonl").write_text(f'{{"answer": {written}}}\n')
        return open_rows(tmp_path / "rows.jsonl", "task.file").row(0)

    return read


@pytest.mark.parametrize("written", WRITTEN)
def test_a_number_keeps_its_digits_and_has_no_exponent(row_of, written):
    row = row_of(written)
    assert right_answer(row, "answer") == WRITTEN[written]
    assert row["answer"] == json.loads(written)
    prompt = Prompt(text="?", row=row)
    for response in (written, f" {WRITTEN[written]}\n"):
        assert EXACT(prompt, response) == 1.0
    for response in ("", "41", f"{WRITTEN[written]} 1", f"1{WRITTEN[written].removeprefix('-')}", "nan"):
        assert EXACT(prompt, response) == 0.0


def test_a_text_is_no_number():
    assert EXACT(Prompt(text="?", row={"answer": "42"}), "42.0") == 0.0
    assert EXACT(Prompt(text="?", row={"answer": "4.20"}), "4.20") == 1.0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_every_decimal_equals_itself_only(number):
    row = {"answer": number}
    prompt = Prompt(text="?", row=row)
    assert EXACT(prompt, right_answer(row, "answer")) == 1.0
    assert EXACT(prompt, f"{number:f}") == 1.0
    assert EXACT(prompt, f"{number + Decimal('0.000001'):f}") == 0.0


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), Decimal("NaN"), Decimal("1e1000000000"), WrittenFloat("1e9999999999999999999")],
)
def test_what_is_no_number_or_has_endless_digits_is_refused(value):
    with pytest.raises(ConfigError, match="a right answer is a text or number"):
        right_answer({"answer": value}, "answer")


@pytest.mark.parametrize("kind", ["float32", "float64", "decimal128(9, 4)", "int64"])
def test_numbers_of_parquet_files_keep_their_digits(tmp_path, kind):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Parquet files are not tested")
    from pyarrow import parquet

    kinds = {"decimal128(9, 4)": pa.decimal128(9, 4), "int64": pa.int64()}
    value = {"decimal128(9, 4)": Decimal("0.1000"), "int64": 2**60 + 1}.get(kind, 0.1)
    column = pa.array([1.0 if kind.startswith("float") else value, value], kinds.get(kind, pa.float64()))
    if kind == "float32":
        column = column.cast(pa.float32())
    parquet.write_table(pa.table({"answer": column, "prompt": ["x", "y"]}), tmp_path / "rows.parquet")
    row = open_rows(tmp_path / "rows.parquet", "task.file").row(1)
    assert Decimal(right_answer(row, "answer")) == Decimal(str(value))
