from __future__ import annotations

from sparkdl.launch.outcome import Failure, find_culprit

CAUSE = Failure(rank=2, host="a", error="LookupError: none", traceback="...", pickled=b"x")
CONSEQUENCE = Failure(rank=0, host="b", error="RankLostError: rank 2", traceback="...", is_consequence=True)


def test_cause_is_the_culprit_though_a_consequence_was_heard_first() -> None:
    assert find_culprit([CONSEQUENCE, CAUSE]) is CAUSE


def test_first_consequence_is_the_culprit_when_no_cause_is_known() -> None:
    assert find_culprit([CONSEQUENCE]) is CONSEQUENCE


def test_no_failure_has_no_culprit() -> None:
    assert find_culprit([]) is None


def test_failure_survives_json() -> None:
    assert Failure.from_json(CAUSE.to_json(), pickled=b"x") == CAUSE
