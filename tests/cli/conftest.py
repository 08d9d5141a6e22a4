import numpy as np
import pytest

from relibra import write_trace
from relibra.cli.main import main
from relibra.routing.synthetic import TraceShape, domain_trace


@pytest.fixture
def routes():
    """160 samples of five tokens, 2 layers, 8 experts."""
    shape = TraceShape(rows_per_sample=[5] * 160, num_layers=2, num_experts=8, top_k=2)
    return domain_trace(shape, np.random.default_rng(0), num_domains=2)


@pytest.fixture
def trace(tmp_path, routes):
    write_trace(routes, tmp_path / "t")
    return tmp_path / "t"


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the program as the shell would; return (exit code, stdout, stderr).

    Its output is not a terminal, so it has no width: the width that a library may have put into the environment of the
    tests is taken out.
    """
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["relibra", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        return code, *capsys.readouterr()

    return call
