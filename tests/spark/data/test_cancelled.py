"""Launches that are cancelled: in Spark, by Ctrl-C, or by a timeout."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.data import materialize
from sparkdl.errors import LaunchCancelledError, LaunchError
from sparkdl.launch import ranks, run_on_ranks, supervision
from sparkdl.launch.spark_job import TaggedCall, collect_within
from sparkdl.launch.wire.channel import PURPOSE, DriverChannel, RankMessage
from sparkdl.rendezvous.dialing import connect_authenticated
from tests.collective.eventually import eventually
from tests.processes import wait_until_gone
from tests.spark.launch import rank_functions as functions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.launch.rank_functions import Launch


@pytest.fixture
def cancel(spark: SparkSession, spark_mode: str) -> Any:
    """A function that cancels from another thread what the test's own thread runs."""
    if spark_mode == "connect":
        spark.addTag("of-this-test")
        yield lambda: spark.interruptTag("of-this-test")
        spark.removeTag("of-this-test")
        return
    context = spark.sparkContext
    context.setJobGroup("of this test", "to be cancelled", interruptOnCancel=True)
    yield lambda: context.cancelJobGroup("of this test")
    for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
        context.setLocalProperty(name, None)


@pytest.mark.slow_on("local")
@pytest.mark.no_cluster_needed
def test_cancelled_launch_ends_its_ranks_and_the_next_launch_runs(
    launch: Launch, cancel: Callable[[], None], tmp_path: Path
) -> None:
    hanging: set[int] = set()
    cancelled = threading.Event()

    def hear(rank: int, event: dict[str, Any]) -> None:
        hanging.add(event["hanging"])
        if len(hanging) == 2:
            threading.Thread(target=lambda: (cancel(), cancelled.set())).start()

    with pytest.raises(LaunchCancelledError, match=r": 2 ranks: .* cancelled in Spark: .*(?i:cancel)"):
        launch(functions.hang, str(tmp_path), on_event=hear)
    assert cancelled.wait(30)
    pids = functions.pids_in(tmp_path)
    assert len(pids) == 4
    assert wait_until_gone(pids) == []
    assert launch(functions.sum_of_ranks) == [3.0, 3.0]


@pytest.mark.slow_on("local")
@pytest.mark.no_cluster_needed
def test_rows_whose_writing_spark_cancels_are_removed(
    spark: SparkSession, cancel: Callable[[], None], hold: Callable[[Any], Any], tmp_path: Path
) -> None:
    def cancel_once_it_runs() -> None:
        if eventually((tmp_path / "running").exists, timeout_s=60):
            cancel()

    canceller = threading.Thread(target=cancel_once_it_runs)
    canceller.start()
    rows = spark.range(0, 10, 1, 1).mapInArrow(hold, "id long")
    try:
        with pytest.raises(LaunchCancelledError, match=r"writing rows: .* in Spark: .*(?i:cancel)"):
            materialize(rows, ["id"], tmp_path / "store")
    finally:
        canceller.join()
    assert not list((tmp_path / "store").glob("fit-*"))


@pytest.mark.slow  # in its own process, because the session of the other tests has to persist
@pytest.mark.any_spark_will_do
@pytest.mark.usefixtures("spark")  # sets the variables that Spark needs
def test_ended_application_raises_cluster_lost_error_and_is_not_restarted(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, threading\n"
        "from pyspark.sql import SparkSession\n"
        "from sparkdl import Runner\n"
        "from tests.spark.launch import rank_functions\n"
        "spark = SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "threading.Thread(target=lambda: (input(), spark.sparkContext._jsc.stop())).start()\n"
        "try:\n"
        "    Runner(num_workers=2, max_restarts=3).run(rank_functions.hang_on_rank, sys.argv[1])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error, flush=True)\n"
    )
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert eventually(lambda: len(list(tmp_path.glob("*.pids"))) == 2, timeout_s=60)
        told, _ = driver.communicate("\n", timeout=500)
    assert told.startswith("ClusterLostError sparkdl run hang_on_rank: 2 ranks: Spark's application ended"), (
        told
    )
    assert wait_until_gone(functions.pids_in(tmp_path)) == []


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.mark.any_spark_will_do
def test_call_that_is_cancelled_before_it_submits_its_job_ends(
    spark: SparkSession, hold: Callable[[Any], Any]
) -> None:
    submits, slow_frame = threading.Event(), spark.range(0, 1, 1, 1).mapInArrow(hold, "id long")

    def collect() -> Any:
        assert submits.wait(60)
        return slow_frame.collect()

    call = TaggedCall(spark, "sparkdl-cancelled", collect)
    call.cancel(timeout_s=0.01)
    assert call.running, "Spark knows nothing of it yet"
    submits.set()
    call.cancel(timeout_s=30)
    assert not call.running
    assert "cancel" in str(call.error).lower()


@pytest.mark.any_spark_will_do
def test_end_of_a_call_wakes_who_asked_before_and_after_it(spark: SparkSession) -> None:
    may_end, before, after = threading.Event(), threading.Event(), threading.Event()
    call = TaggedCall(spark, "sparkdl-ends", may_end.wait)
    call.call_at_end(before.set)
    assert not before.is_set()
    may_end.set()
    assert before.wait(60)
    call.call_at_end(after.set)
    assert after.is_set()


@pytest.mark.any_spark_will_do
def test_launch_that_is_cancelled_before_its_job_is_active_runs_no_rank(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    channels: list[tuple[DriverChannel, bytes]] = []

    class KnownChannel(DriverChannel):
        def __init__(self, secret: bytes, num_ranks: int, **places: Any) -> None:
            super().__init__(secret, num_ranks, **places)
            channels.append((self, secret))

        def next_message(self, timeout_s: float) -> RankMessage | None:
            raise KeyboardInterrupt  # like a Ctrl-C before Spark has received the job

    monkeypatch.setattr(ranks, "DriverChannel", KnownChannel)
    monkeypatch.setattr(supervision, "CANCEL_TIMEOUT_S", 0.0)
    ran = tmp_path / "ran"
    with pytest.raises(KeyboardInterrupt):
        run_on_ranks(lambda context: ran.touch(), num_ranks=1, spark=spark)
    (canceller,) = threads("sparkdl-cancel")
    canceller.join(60)
    assert not canceller.is_alive()
    assert eventually(lambda: not threads("sparkdl-job"), timeout_s=20)
    assert not ran.exists()
    ((channel, secret),) = channels
    with pytest.raises(OSError):
        connect_authenticated(channel.address, secret, purpose=PURPOSE, timeout_s=5)


@pytest.mark.any_spark_will_do
def test_interrupt_ends_a_job_with_a_timeout(
    spark: SparkSession, hold: Callable[[Any], Any], tmp_path: Path
) -> None:
    # pyspark's handler cancels all jobs itself.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        if eventually((tmp_path / "running").exists, timeout_s=60):
            signal.pthread_kill(main, signal.SIGINT)

    frame = spark.range(0, 1, 1, 1).mapInArrow(hold, "id long")
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            collect_within(spark, frame, 90)
    finally:
        signal.signal(signal.SIGINT, before)
        interrupter.join()
    assert eventually(lambda: not threads("sparkdl-job"), timeout_s=20)


@pytest.mark.any_spark_will_do
def test_job_that_exceeds_its_timeout_is_ended(spark: SparkSession, hold: Callable[[Any], Any]) -> None:
    frame = spark.range(0, 1, 1, 1).mapInArrow(hold, "id long")
    with pytest.raises(LaunchError, match="had not run the tasks within 1 s"):
        collect_within(spark, frame, 1)
    assert eventually(lambda: not threads("sparkdl-job"), timeout_s=20)
