"""Tables of results in terminals of any width."""

import pytest

from relibra.cli.outputs.terminal import print_table

ROWS = [
    {"name": "relibra_paper_anywhere", "tokens_per_second_per_rank": 123456.0, "gain": 1.5, "why": "a few words " * 9},
    {"name": "static", "tokens_per_second_per_rank": None, "gain": "2/4", "why": ""},
]


@pytest.mark.parametrize(("width", "shown"), [(24, 1), (36, 2), (40, 3), (60, 4), (None, 4)])
def test_a_narrow_terminal_leaves_out_the_last_columns(capsys, monkeypatch, width, shown):
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    assert print_table(ROWS) == list(ROWS[0])[:shown]
    out = capsys.readouterr().out
    table, _, left_out = out.partition("no room for ")
    assert bool(left_out) == (shown < 4)
    assert max(map(len, table.splitlines())) <= (width or 200)
    assert {"relibra_paper_anywhere", "static"} <= set(table.split()), "names are whole"
    if shown > 2:
        assert {"123,456", "1.5", "2/4", "-"} <= set(table.split())
