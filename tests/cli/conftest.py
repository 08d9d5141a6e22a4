import pytest

from relibra.cli.main import main


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
