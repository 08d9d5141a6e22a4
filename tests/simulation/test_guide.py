"""docs/simulation.md runs, prints what it says, and names what exists."""

import contextlib
import io
import re
from pathlib import Path

import relibra.simulation

GUIDE = Path(__file__).parent.parent.parent / "docs" / "simulation.md"


def test_blocks_of_the_guide_print_what_they_say():
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) == GUIDE.read_text().count("```python") == 5
    around = {}
    for program, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "docs/simulation.md", "exec"), around)
        assert printed.getvalue() == expected


def test_the_guide_and_the_package_name_the_public_names():
    told = GUIDE.read_text() + relibra.simulation.__doc__
    for name in relibra.simulation.__all__:
        assert getattr(relibra.simulation, name) is not None
        if name[0].islower():
            assert name in told, f"{name} is explained nowhere"
