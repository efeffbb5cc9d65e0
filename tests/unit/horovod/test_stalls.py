"""Warnings about requests that some ranks do not make, and giving them up if that is set."""

from __future__ import annotations

import logging

import pytest

from sparkdl.collective import StallCheck
from sparkdl.errors import ParamError
from sparkdl.horovod.torch.basics import read_stall_check
from sparkdl.horovod.torch.engine.plan import RequestReport
from sparkdl.horovod.torch.engine.stalls import REMEDY, StallWatch, find_stall


def test_warning_names_only_requests_that_stay_missing(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch("'world'", warn_after_s=1e-9)
    with caplog.at_level(logging.WARNING):
        watch.note({"allreduce.a": [1, 2]})
        watch.note({"allreduce.a": [1, 2]})
    assert "allreduce.a has waited" in caplog.text
    assert "on 'world': ranks 1, 2 did not ask" in caplog.text
    caplog.clear()
    for patient in (StallWatch("world", warn_after_s=60.0), StallWatch("world", warn_after_s=None)):
        with caplog.at_level(logging.WARNING):
            patient.note({"allreduce.a": [1]})
            patient.note({})
        assert not caplog.text


def test_missing_request_is_stalled_until_it_has_run() -> None:
    watch = StallWatch("world", warn_after_s=None, abort_after_s=1e-9)
    assert watch.find_stalled() == {}
    missing = {"allreduce.a": [1], "allreduce.b": [0]}
    watch.note(missing)
    while set(watch.find_stalled()) != set(missing):
        pass
    assert watch.find_stalled() == {"allreduce.a": 1e-9, "allreduce.b": 1e-9}
    watch.note_run("allreduce.a")  # no report of the ranks shows that it is no longer missing
    assert set(watch.find_stalled()) == {"allreduce.b"}
    patient = StallWatch("world", warn_after_s=None)
    patient.note(missing)
    assert patient.find_stalled() == {}


def test_all_ranks_give_up_a_request_that_one_rank_reports_as_stalled() -> None:
    missing = {"allreduce.a": [1, 2]}
    reports = [
        None,
        RequestReport(requests=(), stalled={"allreduce.a": 3.0, "allreduce.ran": 3.0}),
        RequestReport(requests=()),
    ]
    stall = find_stall("'world'", reports, missing)
    assert stall is not None
    assert stall.startswith("On 'world', allreduce.a stalled for 3 s: ranks 1, 2 ")
    assert stall.endswith(REMEDY)
    assert "allreduce.ran" not in stall
    assert find_stall("'world'", reports, {}) is None
    assert find_stall("'world'", [None, RequestReport(requests=())], missing) is None


def test_stall_check_is_read_from_horovods_variables() -> None:
    assert read_stall_check({}) == StallCheck(warn_after_s=60.0, abort_after_s=None)
    assert read_stall_check(
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    ) == StallCheck(warn_after_s=2.0, abort_after_s=5.0)
    assert read_stall_check({"HOROVOD_STALL_CHECK_DISABLE": "1"}) == StallCheck(warn_after_s=None)
    with pytest.raises(ParamError, match="HOROVOD_STALL_CHECK_TIME_SECONDS must be a number, got 'soon'"):
        read_stall_check({"HOROVOD_STALL_CHECK_TIME_SECONDS": "soon"})
