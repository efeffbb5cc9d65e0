"""Jobs that are given up: at once, or by Ctrl-C, and before Spark has begun with them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.errors import LaunchError
from sparkdl.launch import run, run_on_ranks
from sparkdl.launch.spark_job import TaggedCall, collect_within
from sparkdl.launch.wire.channel import PURPOSE, DriverChannel, RankMessage
from sparkdl.rendezvous.dialing import connect_authenticated
from tests.collective.eventually import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.any_spark_will_do


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_call_that_is_cancelled_before_it_has_submitted_its_job_ends(
    spark: SparkSession, hold: Callable[[Any], Any]
) -> None:
    submits, slow_frame = threading.Event(), spark.range(0, 1, 1, 1).mapInArrow(hold, "id long")

    def collect() -> Any:
        assert submits.wait(60)
        return slow_frame.collect()

    call = TaggedCall(spark, "sparkdl-given-up", collect)
    call.cancel(timeout_s=0.01)
    assert call.running, "Spark knows nothing of it yet"
    submits.set()
    call.cancel(timeout_s=30)
    assert not call.running
    assert "cancel" in str(call.error).lower()


def test_launch_that_is_given_up_before_its_job_is_active_runs_no_rank(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    channels: list[tuple[DriverChannel, bytes]] = []

    class KnownChannel(DriverChannel):
        def __init__(self, secret: bytes, num_ranks: int, **places: Any) -> None:
            super().__init__(secret, num_ranks, **places)
            channels.append((self, secret))

        def next_message(self, timeout_s: float) -> RankMessage | None:
            raise KeyboardInterrupt  # as by Ctrl-C, when Spark has not been given the job yet

    monkeypatch.setattr(run, "DriverChannel", KnownChannel)
    monkeypatch.setattr(run, "CANCEL_TIMEOUT_S", 0.0)
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


def test_interrupt_ends_a_job_that_may_take_only_so_long(
    spark: SparkSession, hold: Callable[[Any], Any], tmp_path: Path
) -> None:
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # that of pyspark cancels all jobs itself
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


def test_job_that_takes_longer_than_it_may_is_ended(spark: SparkSession, hold: Callable[[Any], Any]) -> None:
    frame = spark.range(0, 1, 1, 1).mapInArrow(hold, "id long")
    with pytest.raises(LaunchError, match="had not run the tasks within 1 s"):
        collect_within(spark, frame, 1)
    assert eventually(lambda: not threads("sparkdl-job"), timeout_s=20)
