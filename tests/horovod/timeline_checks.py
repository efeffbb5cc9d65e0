"""The timeline and the stall inspector, switched on as Horovod's users do it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import sparkdl.horovod.torch as hvd
from sparkdl.collective import StallCheck
from sparkdl.errors import ParamError
from sparkdl.horovod.torch.current_session import session
from tests.collective.eventually import eventually
from tests.collective.scenes.trace_file import TraceFile
from tests.horovod.worlds import again_with


@contextmanager
def file_of_all() -> Iterator[Path]:
    """A path in a folder that rank 0 makes and removes; the same path on all ranks."""
    folder = tempfile.TemporaryDirectory() if hvd.rank() == 0 else None
    name = hvd.broadcast_object(folder.name if folder else None, root_rank=0)
    try:
        yield Path(name) / "timeline.json"
        hvd.barrier()
    finally:
        if folder is not None:
            folder.cleanup()


def check(path: Path) -> None:
    trace = TraceFile(path)
    assert list(trace.processes) == [0, 1]
    text = path.read_text()
    # Texts that Horovod's users search for.
    for expected in ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "start_time_since_epoch_in_micros"):
        assert expected in text, expected


def check_timeline_is_started_and_stopped_at_run_time() -> None:
    with file_of_all() as path:
        hvd.start_timeline(str(path))
        for _ in range(10):
            hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), name="test_allreduce")
        hvd.stop_timeline()
        check(path)
        assert "CYCLE_START" not in path.read_text()
        hvd.stop_timeline()  # does nothing, as in Horovod


def check_timeline_can_be_read_while_it_runs() -> None:
    with file_of_all() as path:
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="first")
        expected = ("allreduce.first", "NEGOTIATE_ALLREDUCE", "CYCLE_START")
        if hvd.rank() == 0:
            assert eventually(lambda: all(text in path.read_text() for text in expected))
        hvd.allreduce(torch.ones(3), name="second")
        if hvd.rank() == 0:
            assert eventually(lambda: "allreduce.second" in path.read_text())
            # A reader has to close the list, which is not complete yet.
            seen = json.loads(path.read_text().rstrip().removesuffix(",") + "]")
            assert {event["pid"] for event in seen} == {0}
            operations = [event["args"]["name"] for event in seen if event.get("cat") == "ALLREDUCE"]
            assert [name.split()[0] for name in operations] == ["allreduce.first", "allreduce.second"]
        hvd.stop_timeline()
        hvd.barrier()
        trace = TraceFile(path)
        assert list(trace.processes) == [0, 1]


def check_timeline_that_is_started_anew_goes_on_in_another_file() -> None:
    with file_of_all() as path:
        second = path.with_name("second.json")
        hvd.start_timeline(str(path))
        hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), name="test_allreduce")
        hvd.start_timeline(str(second))
        hvd.barrier()
        check(path)
        hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), name="another")
        hvd.stop_timeline()
        hvd.barrier()
        assert "allreduce.another" in second.read_text()
        assert "test_allreduce" not in second.read_text()


def check_timeline_marks_where_a_rank_begins_to_run_requests() -> None:
    with file_of_all() as path:
        hvd.start_timeline(str(path), mark_cycles=True)
        late = hvd.add_process_set([0])
        for _ in range(10):
            hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), name="test_allreduce")
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), process_set=late)
        hvd.stop_timeline()
        check(path)
        trace = TraceFile(path)
        marks = [event for event in trace.events if event["name"] == "CYCLE_START"]
        operations = [event for event in trace.events if event.get("cat") == "ALLREDUCE"]
        places = {(event["pid"], event["tid"]) for event in operations}
        # Two ranks in the set of all ranks, and rank 0 in the late set.
        assert len(places) == 3
        for place in places:
            times = [mark["ts"] for mark in marks if (mark["pid"], mark["tid"]) == place]
            starts = [event["ts"] for event in operations if (event["pid"], event["tid"]) == place]
            assert len(times) >= len(starts)
            assert min(times) <= min(starts)
        hvd.remove_process_set(late)


def check_timeline_of_the_environment_lasts_until_shutdown() -> None:
    with file_of_all() as path:
        only_there = {"HOROVOD_TIMELINE": str(path)} if hvd.rank() == 0 else {}
        with again_with(**only_there):
            for _ in range(10):
                hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), name="test_allreduce")
        hvd.barrier()
        check(path)
    with again_with(HOROVOD_TIMELINE="DYNAMIC"):
        hvd.allreduce(torch.ones(1))
    assert not Path("DYNAMIC").exists()


def check_stall_inspector_is_set_by_horovods_variables() -> None:
    with again_with(HOROVOD_STALL_CHECK_TIME_SECONDS="2", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="5"):
        assert session().world.stall_check == StallCheck(warn_after_s=2.0, abort_after_s=5.0)
    with again_with(HOROVOD_STALL_CHECK_DISABLE="1"):
        assert session().world.stall_check == StallCheck(warn_after_s=None)
    with (
        pytest.raises(ParamError, match="must be a number"),
        again_with(HOROVOD_STALL_CHECK_TIME_SECONDS="soon"),
    ):
        pass
    hvd.init()
    assert session().world.stall_check == StallCheck()


def check_rank_that_never_joins_ends_the_others_when_asked() -> None:
    with again_with(HOROVOD_STALL_CHECK_TIME_SECONDS="0.3", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1"):
        if hvd.rank() == 0:
            with pytest.raises(hvd.HorovodInternalError, match=r"stalled for 1\.0 s: rank 1 had not joined"):
                hvd.allreduce(torch.ones(1), name="lonely")
            session().world.rendezvous.set("lonely/over", b"")
        else:
            # It takes part in nothing until it makes a request.
            session().world.rendezvous.get("lonely/over", 20.0)
