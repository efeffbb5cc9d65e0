from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.collective import new_secret
from sparkdl.errors import (
    ExecutorsLostError,
    LaunchError,
    ParamError,
    RankDiedError,
    RankError,
    SerializationError,
)
from sparkdl.launch import ranks, run_on_ranks, wait_for_slots
from sparkdl.launch.task.meeting import Meeting, Peer
from sparkdl.launch.wire.channel import DriverChannel, DriverLink
from sparkdl.launch.wire.spec import LaunchSpec, installed_versions
from sparkdl.rendezvous.addresses import Address
from sparkdl.spark.jobs import spark_job
from tests.collective.eventually import eventually
from tests.flood import flooded
from tests.launchers import ROOT
from tests.processes import wait_until_gone
from tests.spark.launch import rank_functions as functions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from tests.spark.launch.rank_functions import Launch


@pytest.fixture(scope="module")
def described(spark: SparkSession) -> list[dict[str, Any]]:
    """The values of two ranks that describe themselves."""
    return run_on_ranks(
        functions.describe,
        "hello",
        num_ranks=2,
        spark=spark,
        environment={"SPARKDL_TEST": "yes"},
        suffix="!",
    )


def test_every_rank_returns_its_value_in_order(described: list[dict[str, Any]]) -> None:
    assert [(v["rank"], v["world_size"], v["text"]) for v in described] == [
        (0, 2, "hello!"),
        (1, 2, "hello!"),
    ]
    assert described[0]["pid"] != described[1]["pid"]


def test_environment_is_set_for_the_ranks_only(described: list[dict[str, Any]]) -> None:
    assert [rank["variable"] for rank in described] == ["yes", "yes"]
    assert "SPARKDL_TEST" not in os.environ


def test_ranks_of_one_executor_are_forked_from_one_forkserver(described: list[dict[str, Any]]) -> None:
    assert len({rank["forkserver"] for rank in described}) == len({rank["executor"] for rank in described})


# Each case starts its own server; the first one also catches a failure, and continues.
@pytest.mark.slow
@pytest.mark.about_connect
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_stops_no_session_ends_by_itself(fails: bool) -> None:
    program = f"""
import sys
from pyspark.sql import SparkSession
from sparkdl.launch import run_on_ranks
from tests.spark.launch import rank_functions as functions
spark = SparkSession.builder.remote("local[2]").getOrCreate()
try:
    run_on_ranks(functions.fail_on, 1, num_ranks=2, spark=spark)
except Exception as error:
    if {fails}:
        raise
    print(error, file=sys.stderr)
print(run_on_ranks(functions.sum_of_ranks, num_ranks=2, spark=spark))
"""
    # Remove the variables that the tests' own session has set for its server.
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    environment |= {"SPARK_TESTING": "1", "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == int(fails), ended.stderr
    assert "looked in vain" in ended.stderr
    assert ("[3.0, 3.0]" in ended.stdout) == (not fails)


@pytest.mark.slow_elsewhere
def test_launch_on_one_machine_listens_only_on_loopback(launch: Launch) -> None:
    values = launch(functions.where_they_listen, os.getpid())
    assert values == [["127.0.0.1"]] * 2


class FloodedChannel(DriverChannel):
    """A driver whose port gets many connections without the secret."""

    def __init__(self, secret: bytes, num_ranks: int, **options: Any) -> None:
        super().__init__(secret, num_ranks, **options)
        self._flood = flooded(self.address.port, 2000)
        self._flood.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._flood.__exit__(*exception)
        super().__exit__(*exception)


@pytest.mark.any_spark_will_do
def test_ranks_start_and_print_while_the_drivers_port_is_flooded(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "DriverChannel", FloodedChannel)
    lines: list[tuple[int, str]] = []
    values = launch(functions.say_and_wait, 0.0, on_log=lambda *said: lines.append(said))
    assert values == [0, 1]
    assert sorted(lines) == [(0, "from rank 0"), (1, "from rank 1")]


@pytest.mark.slow_elsewhere
def test_ranks_share_an_mpi_world_without_mpirun(launch: Launch) -> None:
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    values = launch(functions.mpi_world, transport="mpi")
    assert values == [(0, 2, 3.0), (1, 2, 3.0)]


@pytest.mark.parametrize(
    "culprit", [pytest.param(0, marks=[pytest.mark.slow, pytest.mark.any_spark_will_do]), 1]
)
def test_failing_rank_is_named_with_host_and_traceback(launch: Launch, culprit: int) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=f"Rank {culprit} .*looked in vain") as caught:
        launch(functions.fail_on, culprit)
    assert time.monotonic() - started < 100  # operations wait for 300 s
    assert caught.value.rank == culprit
    assert caught.value.host
    assert "fail_on" in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.slow_elsewhere
def test_ranks_have_the_threads_of_their_slots_unless_the_user_chose_others(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(functions.count_threads, modules=("torch",)) == [(1, "1")] * 2
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "2"
    )  # of the machine of the driver, which is also that of the executors
    assert launch(functions.count_threads) == [(2, "2")] * 2


@pytest.mark.slow
@pytest.mark.any_spark_will_do
def test_threads_of_a_launch_precede_those_of_the_environment(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(functions.count_threads, threads_per_rank=2, modules=("torch",)) == [(2, "2")] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launch(functions.count_threads, environment={"OMP_NUM_THREADS": "1"})[1][0] == 1


@pytest.mark.parametrize(
    "culprit",
    [
        pytest.param(0, marks=[pytest.mark.slow, pytest.mark.any_spark_will_do]),
        pytest.param(1, marks=pytest.mark.slow_elsewhere),
    ],
)
def test_killed_rank_ends_all_long_before_any_deadline(launch: Launch, culprit: int) -> None:
    started = time.monotonic()
    with pytest.raises(RankDiedError, match="SIGKILL") as caught:
        launch(functions.kill_on, culprit)
    assert caught.value.rank == culprit
    assert time.monotonic() - started < 100  # operations wait for 300 s


@pytest.mark.slow_on("local")
def test_lost_python_worker_is_named_and_nothing_runs_twice(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(RankDiedError, match="lost") as caught:
        launch(functions.kill_own_worker_on, 1, str(tmp_path))
    assert caught.value.rank == 1
    pids = functions.pids_in(tmp_path)
    assert len(pids) == 2
    assert wait_until_gone(pids) == []


@pytest.mark.no_cluster_needed
def test_interrupt_on_the_driver_leaves_no_process_behind(launch: Launch, tmp_path: Path) -> None:
    hanging: set[int] = set()

    def interrupt_when_all_hang(rank: int, event: dict[str, Any]) -> None:
        hanging.add(rank)
        if len(hanging) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(functions.hang, str(tmp_path), on_event=interrupt_when_all_hang)
    pids = functions.pids_in(tmp_path)
    assert len(pids) == 4
    assert wait_until_gone(pids) == []
    assert launch(functions.sum_of_ranks) == [3.0, 3.0]


@pytest.mark.any_spark_will_do
def test_every_line_and_event_reaches_the_driver_in_order(launch: Launch) -> None:
    lines: dict[int, list[str]] = {0: [], 1: []}
    events: list[tuple[int, dict[str, Any]]] = []
    launch(
        functions.print_and_report,
        5000,
        on_log=lambda rank, line: lines[rank].append(line),
        on_event=lambda rank, event: events.append((rank, event)),
    )
    for rank in (0, 1):
        assert lines[rank] == [f"line {number} of rank {rank}" for number in range(5000)]
    assert sorted(rank for rank, _ in events) == [0, 1]
    assert events[0][1]["loss"] == 0.5


class UnreachableChannel(DriverChannel):
    """A driver that executors cannot reach, like a Connect client behind a firewall."""

    def __init__(self, secret: bytes, num_ranks: int, **options: Any) -> None:
        super().__init__(secret, num_ranks, **options)
        with socket.create_server(("127.0.0.1", 0)) as closed_soon:
            self.address = Address(("127.0.0.1",), closed_soon.getsockname()[1])


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    "seconds",
    # The second time is longer than Spark may be silent about its tasks.
    [0.5, pytest.param(16.0, marks=pytest.mark.slow)],
)
def test_ranks_that_cannot_reach_the_driver_run_and_return_their_lines_with_the_result(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(ranks, "DriverChannel", UnreachableChannel)
    lines: list[tuple[int, str]] = []
    values = launch(
        functions.say_and_wait,
        seconds,
        start_timeout_s=1,
        on_log=lambda rank, line: lines.append((rank, line)),
    )
    assert values == [0, 1]
    assert sorted(lines) == [(0, "from rank 0"), (1, "from rank 1")]


@pytest.mark.any_spark_will_do
def test_version_that_differs_on_an_executor_is_named(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {**installed_versions(), "cloudpickle": "0.1"}
    monkeypatch.setattr("sparkdl.launch.spark_launch.LaunchSpec", partial(LaunchSpec, versions=versions))
    with pytest.raises(LaunchError, match="cloudpickle is 0.1 on the driver and .* on the executor"):
        launch(functions.sum_of_ranks)


def test_dynamic_allocation_is_refused_with_the_setting_except_on_a_local_master(
    spark: SparkSession, spark_mode: str, launch: Launch
) -> None:
    if spark_mode == "connect":
        pytest.skip("a Connect client cannot change the server's settings")
    conf = spark.sparkContext._conf
    conf.set("spark.dynamicAllocation.enabled", "true")
    try:
        if spark_mode == "local":
            assert launch(functions.sum_of_ranks) == [3.0, 3.0]
            return
        with pytest.raises(LaunchError, match=r"spark\.dynamicAllocation\.enabled=false"):
            launch(functions.sum_of_ranks)
    finally:
        conf.set("spark.dynamicAllocation.enabled", "false")


@pytest.mark.slow_elsewhere
def test_result_larger_than_the_fetch_window_arrives_whole(launch: Launch) -> None:
    num_bytes = (100 << 20) + 7
    first, second = launch(functions.make_bytes, num_bytes)
    assert first == bytes(num_bytes)
    assert second is None


def test_more_ranks_than_slots_are_refused_before_anything_starts(
    spark: SparkSession, spark_mode: str
) -> None:
    if spark_mode == "local":
        conf = spark.sparkContext._conf
        conf.set("spark.task.cpus", "2")
        try:
            with pytest.raises(LaunchError, match=r"has 1.* or lower spark\.task\.cpus: .* takes 2 cores"):
                run_on_ranks(functions.sum_of_ranks, num_ranks=2, spark=spark)
        finally:
            conf.set("spark.task.cpus", "1")
    with pytest.raises(LaunchError, match=r"3 ranks need 3 slots.*has 2.*\(numWorkers, .*\) to 2"):
        run_on_ranks(functions.sum_of_ranks, num_ranks=3, spark=spark)


@pytest.mark.any_spark_will_do
def test_ranks_that_find_no_free_slot_are_reported(
    spark: SparkSession,
    hold: Callable[[Any], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: Launch,
) -> None:
    # No task of the launch starts, so Spark reports none late.
    monkeypatch.setattr("sparkdl.launch.spark_job.STATUS_LAG_S", 0.5)
    # As many tasks as there are ranks; they must not be mistaken for those of the launch.
    other_job = spark.range(0, 2, 1, 2).mapInArrow(hold, "id long")
    blocker = threading.Thread(target=other_job.collect)
    blocker.start()
    try:
        assert eventually((tmp_path / "running").exists, timeout_s=60)
        with pytest.raises(LaunchError, match="0 of 2 ranks had started after 1 s"):
            launch(functions.sum_of_ranks, start_timeout_s=1)
    finally:
        (tmp_path / "release").touch()
        blocker.join()


class Toucher(logging.Handler):
    """Creates a file when a message is logged that contains a text."""

    def __init__(self, text: str, path: Path) -> None:
        super().__init__()
        self.text, self.path = text, path

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.path.touch()


@pytest.mark.slow_on("local")
def test_ranks_wait_without_limit_for_the_slots_of_another_launch(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, launch: Launch
) -> None:
    caplog.set_level(logging.INFO, "sparkdl.launch.spark_job")
    release, running = tmp_path / "release", threading.Event()
    first = threading.Thread(
        target=run_on_ranks,
        args=(functions.wait_for_file, str(release)),
        kwargs={"num_ranks": 1, "spark": spark, "on_event": lambda rank, event: running.set()},
    )
    logger, toucher = logging.getLogger("sparkdl.launch.spark_job"), Toucher("another launch", release)
    first.start()
    try:
        assert running.wait(60)
        logger.addHandler(toucher)
        # The first launch ends only when the second has waited longer than its start timeout.
        values = launch(functions.sum_of_ranks, start_timeout_s=2)
        assert values == [3.0, 3.0]
    finally:
        logger.removeHandler(toucher)
        release.touch()
        first.join()


@pytest.mark.any_spark_will_do
@pytest.mark.parametrize(
    ("given", "options", "error", "said"),
    [
        ("", {"num_ranks": 0}, ParamError, "at least 1, got 0"),
        ("", {"transport": "carrier pigeon"}, ParamError, "'carrier pigeon' is unknown.*auto.*mpi"),
        (threading.Lock(), {}, SerializationError, "argument 0"),
    ],
)
def test_invalid_arguments_are_refused(
    spark: SparkSession, given: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run_on_ranks(functions.describe, given, **{"num_ranks": 2, "spark": spark, **options})


def executors_of(context: Any) -> list[str]:
    return sorted(context._jsc.sc().getExecutorIds().mkString(",").split(","))


@pytest.mark.timeout(400)
@pytest.mark.about_executors
def test_worker_killed_before_the_tasks_meet_does_not_end_other_executors(
    spark: SparkSession, tmp_path: Path, launch: Launch
) -> None:
    folder, secret = str(tmp_path), new_secret()
    with DriverChannel(secret, 2) as channel:
        address = channel.address

        def meet_the_killed(batches: Any) -> Any:
            from pyspark import BarrierTaskContext

            context = BarrierTaskContext.get()
            rank = context.partitionId()
            with DriverLink(address, secret, rank=rank, host="here") as link:
                mine = Peer(host="here", conflicts=[], mark="", coordinator="")
                if rank == 0:
                    with Meeting(context.allGather, link, mine) as meeting:
                        Path(folder, "0").write_text(str(os.getpid()))
                        meeting.peers(120)
                Path(folder, "1").write_text(str(os.getpid()))
                threading.Event().wait(120)
            yield from batches

        def kill_one() -> None:
            if eventually(lambda: all(Path(folder, name).exists() for name in "01"), timeout_s=120):
                os.kill(int(Path(folder, "1").read_text()), signal.SIGKILL)

        assert wait_for_slots(spark, 2, timeout_s=120) == 2
        context: Any = spark.sparkContext
        before = executors_of(context)
        killer = threading.Thread(target=kill_one)
        killer.start()
        with pytest.raises(ExecutorsLostError), spark_job(spark, "meeting", waits_for_tasks=True):
            spark.range(0, 2, 1, 2).mapInArrow(meet_the_killed, "id long", barrier=True).collect()
        killer.join()
    # The task killed along with the other one has ended by now, two seconds after Spark requested it.
    assert wait_until_gone([int(Path(folder, "0").read_text())]) == []
    assert executors_of(context) == before
    assert launch(functions.sum_of_ranks) == [3.0, 3.0]
