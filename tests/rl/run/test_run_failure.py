"""Which rank a run that ended early names: the first that failed, and none that was ended because of it."""

import signal

import pytest

from relibra.errors import EngineError
from relibra.rl.run.run_failure import EndedRanks, Exit, LostRankError, RankFailure, check_ended

KILLED, ENDED, WAITED_FOR = (RankFailure(code=-number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL))
LOST = RankFailure(code=Exit.LOST_PEER, message="a peer ended")
NAMES = RankFailure(code=Exit.HANGING_PEER, message="no sign of life of rank 1")
BAD = RankFailure(code=Exit.FAILED, message="no idea")
CRASHED = RankFailure(code=Exit.CRASHED, message="Traceback")
STOPPED = RankFailure(code=-signal.SIGKILL, stopped=True)
LEFT = "rank {} ended before the run was complete, without an error"


def raised(tmp_path, failures, done=(), **options):
    ended = EndedRanks(num_ranks=2, done=dict.fromkeys(done, True), failures=failures, **options)
    with pytest.raises(EngineError) as found:
        check_ended(ended, tmp_path / "run", asked=False)
    return str(found.value).removeprefix("the run ended early: "), type(found.value)


@pytest.mark.parametrize(
    ("failures", "cause", "kind"),
    [
        ({1: KILLED, 0: LOST}, "rank 1 was killed by SIGKILL", LostRankError),
        ({0: LOST, 1: KILLED}, "rank 1 was killed by SIGKILL", LostRankError),
        ({1: KILLED, 0: WAITED_FOR}, "rank 1 was killed by SIGKILL", LostRankError),
        ({0: ENDED, 1: CRASHED}, "rank 1 failed (see above)", LostRankError),
        ({1: BAD, 0: ENDED}, "rank 1 failed (see above)", EngineError),
        ({1: BAD, 0: BAD}, "rank 1 failed (see above)", EngineError),
        ({0: NAMES, 1: STOPPED}, "rank 0 lost its peers (see above)", LostRankError),
        ({0: NAMES, 1: WAITED_FOR}, "rank 0 lost its peers (see above)", LostRankError),
        ({0: LOST, 1: LOST}, "rank 0 lost its peers (see above)", LostRankError),
        ({1: STOPPED, 0: LOST}, "the process of rank 1 is stopped (SIGSTOP)", LostRankError),
        ({0: ENDED, 1: ENDED}, "rank 0 was killed by SIGTERM", LostRankError),
        ({0: LOST}, LEFT.format(1), LostRankError),
        ({1: RankFailure(code=7), 0: LOST}, LEFT.format(1), LostRankError),
        ({}, LEFT.format(0), LostRankError),
    ],
)
def test_the_first_rank_that_failed_by_itself_is_named(failures, cause, kind, tmp_path):
    found, kind_found = raised(tmp_path, failures)
    assert found.startswith(cause)
    assert kind_found is kind


def test_ranks_asked_to_stop_before_they_handle_it_are_stopped(tmp_path):
    ended = EndedRanks(num_ranks=2, done={}, failures={0: ENDED, 1: ENDED})
    assert check_ended(ended, tmp_path / "run", asked=True) is False


def test_only_the_error_of_the_rank_that_is_named_is_printed(tmp_path, capsys):
    raised(tmp_path, {1: BAD, 0: LOST})
    assert capsys.readouterr().err == "rank 1: no idea\n"


def test_a_rank_that_has_done_its_work_is_no_cause(tmp_path):
    assert raised(tmp_path, {0: KILLED, 1: KILLED}, done=[0])[0].startswith("rank 1 was killed")


def test_a_lost_machine_comes_first(tmp_path):
    lost = ("node 10.0.0.2 of Ray, with rank 1, was lost",)
    assert raised(tmp_path, {0: LOST}, lost=lost) == (lost[0], LostRankError)
