"""`relibra train`: what is refused before the run begins."""

import pytest


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--expert 2", "option: --expert"),
        ("--experts no", "'--experts'"),
        ("folder --experts 2", "(folder)"),
        ("-h", "help"),
    ],
)
def test_words_that_are_no_server_options_are_refused_first(words, named, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, told = run("train", "rollout.engine=serve", f"rollout.server_options={words}")
    assert (code, out) == (1, "")
    (sentence,) = told.splitlines()
    assert sentence.startswith(f"error: rollout.server_options {words!r}")
    assert named in sentence
    assert not list(tmp_path.iterdir())


def test_options_of_the_server_are_taken(run):
    code, out, _ = run("train", "rollout.engine=serve", "rollout.server_options=--experts 2", "--show-config")
    assert code == 0
    assert "--experts 2" in out
