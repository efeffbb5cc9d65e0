"""Runs a function on ranks and returns what it returned on each. Runs on the driver."""

from __future__ import annotations

import pickle
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.collective.authentication import new_secret
from sparkdl.errors import LaunchError, RankError, SerializationError
from sparkdl.launch.driver_channel import DriverChannel, RankMessage
from sparkdl.launch.launch_spec import LaunchSpec, installed_versions
from sparkdl.launch.outcome import Failure, find_culprit
from sparkdl.launch.preflight import check_cluster
from sparkdl.launch.spark_job import SparkJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CANCEL_TIMEOUT_S = 10.0
LAST_WORDS_TIMEOUT_S = 5.0
SPOOL_BYTES = 64 << 20

OnLog = Callable[[int, str], None]
OnEvent = Callable[[int, dict[str, Any]], None]


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    spark: SparkSession | None = None,
    transport: str = "auto",
    gpus_per_rank: int = 0,
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 300.0,
    operation_timeout_s: float = 300.0,
    on_log: OnLog | None = None,
    on_event: OnEvent | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(context, *args, **kwargs)`` in one process per rank, all at once, and return every rank's value.

    The function, its arguments and its value travel by cloudpickle, in chunks of any number. A failing rank ends all
    of them within seconds; Ctrl-C ends them too. ``on_log`` and ``on_event`` are called on the caller's thread.

    Args:
        function: gets a :class:`~sparkdl.launch.RankContext` first.
        args: further positional arguments.
        num_ranks: how many ranks; each takes a slot of the cluster.
        spark: classic or Connect session; the active one when None.
        transport: of the communicator: ``auto`` (shared memory inside a host, TCP across), ``shm``, ``tcp`` or ``mpi``.
        gpus_per_rank: GPUs that each rank sees.
        environment: variables for the rank processes.
        start_timeout_s: seconds until all ranks must have started, for which slots have to be free.
        operation_timeout_s: default deadline of a collective in seconds.
        on_log: gets rank and line of everything the ranks print; prints ``[rank N] line`` when None.
        on_event: gets rank and event of every ``context.report(event)``.
        kwargs: keyword arguments of the function.

    Returns:
        What the function returned on each rank, by rank.

    Raises:
        SerializationError: if function or arguments cannot be pickled.
        LaunchError: if the ranks cannot be started.
        RankError: if a rank fails; it names the first one, and its ``__cause__`` is that rank's exception.
    """
    payload = _serialize(function, args, kwargs)
    session = spark or _active_session()
    check_cluster(session, num_ranks=num_ranks, gpus_per_rank=gpus_per_rank)
    secret = new_secret()
    with DriverChannel(secret) as channel:
        spec = LaunchSpec(
            job=f"sparkdl-{secrets.token_hex(8)}",
            num_ranks=num_ranks,
            secret=secret,
            payload=payload,
            driver=channel.address,
            transport=transport,
            gpus_per_rank=gpus_per_rank,
            environment=tuple((environment or {}).items()),
            versions=installed_versions(),
            operation_timeout_s=operation_timeout_s,
        )
        job = SparkJob(session, spec)
        try:
            _watch(job, channel, spec, start_timeout_s, _Listener(on_log, on_event))
        except BaseException as error:
            channel.cancel(f"the driver cancelled: {type(error).__name__}")
            job.cancel(timeout_s=CANCEL_TIMEOUT_S)
            raise
        return _collect(job, channel, num_ranks, _Listener(on_log, on_event))


class _Listener:
    """Hands what a rank said to the caller's callbacks."""

    def __init__(self, on_log: OnLog | None, on_event: OnEvent | None) -> None:
        self._on_log = on_log or _print_line
        self._on_event = on_event

    def hear(self, message: RankMessage) -> None:
        if message.line is not None:
            self._on_log(message.rank, message.line)
        elif message.event is not None and self._on_event is not None:
            self._on_event(message.rank, message.event)


def _watch(
    job: SparkJob, channel: DriverChannel, spec: LaunchSpec, start_timeout_s: float, listener: _Listener
) -> None:
    start_deadline = time.monotonic() + start_timeout_s
    while job.running:
        message = channel.next_message(0.1)
        if message is not None:
            listener.hear(message)
        started = channel.started
        # Where tasks cannot reach the driver none is ever heard of, and Spark alone knows.
        if len(started) < spec.num_ranks and time.monotonic() > start_deadline and job.running:
            raise LaunchError(
                f"{len(started)} of {spec.num_ranks} ranks had started after {start_timeout_s:g} s. "
                "Other jobs hold the free slots, or executors are missing: wait for them or lower numWorkers."
            )
    # A rank's last lines may still be on their way when its task has ended.
    deadline = time.monotonic() + LAST_WORDS_TIMEOUT_S
    while True:
        channel.wait_until_silent(max(0.0, deadline - time.monotonic()))
        message = channel.next_message(0.0)
        if message is None:
            return
        listener.hear(message)


def _collect(job: SparkJob, channel: DriverChannel, num_ranks: int, listener: _Listener) -> list[Any]:
    outcomes = job.outcomes()
    for rank, kind, num_chunks in outcomes:
        if kind == "log":
            for line in _fetch(job, rank, kind, num_chunks).decode("utf-8", "replace").splitlines():
                listener.hear(RankMessage(rank=rank, line=line))
    for rank, kind, num_chunks in outcomes:
        if kind == "refused":
            reason = _fetch(job, rank, kind, num_chunks).decode()
            raise LaunchError(f"Driver and executors do not match: {reason}. Install the same versions on both.")
    failures = list(channel.failures)
    for rank, kind, num_chunks in outcomes:
        if kind == "failure":
            pickled = next((c for r, k, c in outcomes if (r, k) == (rank, "error")), 0)
            error = _fetch(job, rank, "error", pickled)
            failures.append(Failure.from_json(_fetch(job, rank, kind, num_chunks), pickled=error))
    culprit = find_culprit(_with_pickled(failures))
    if culprit is not None:
        raise _rank_error(culprit) from _original(culprit)
    if job.error is not None:
        raise LaunchError(f"Spark ended the ranks' stage: {job.error}") from job.error
    chunks = {rank: num_chunks for rank, kind, num_chunks in outcomes if kind == "result"}
    if len(chunks) < num_ranks:
        lost = sorted(set(range(num_ranks)) - set(chunks))
        raise LaunchError(f"Ranks {lost} were lost with their executors. Look at the executors' logs, then run again.")
    return [_load(job, rank, chunks[rank]) for rank in range(num_ranks)]


def _serialize(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        payload: bytes = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        named = {"function": function, **{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
        culprits = [name for name, value in named.items() if not _can_be_pickled(value)]
        raise SerializationError(
            f"{', '.join(culprits) or 'The call'} cannot be pickled, so it cannot travel to the ranks: {error}. "
            "Create locks, connections and sessions inside the function instead."
        ) from error
    return payload


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _active_session() -> SparkSession:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise LaunchError("There is no active Spark session. Pass one as spark=, or create it first.")
    return session


def _with_pickled(failures: list[Failure]) -> list[Failure]:
    """Put the copy that came through Spark, with its exception, in the place of the one that was heard first."""
    complete = {failure.rank: failure for failure in failures if failure.pickled}
    return [complete.get(failure.rank, failure) for failure in failures]


def _rank_error(failure: Failure) -> RankError:
    detail = f"\n\n{failure.traceback.rstrip()}" if failure.traceback else ""
    message = f"Rank {failure.rank} on {failure.host} failed and all ranks were ended: {failure.error}{detail}"
    return RankError(message, rank=failure.rank, host=failure.host, traceback_text=failure.traceback)


def _original(failure: Failure) -> BaseException | None:
    try:
        error = pickle.loads(failure.pickled)  # noqa: S301 - came through Spark's own authenticated channels
    except Exception:
        return None  # its class cannot be built here; the traceback tells
    return error if isinstance(error, BaseException) else None


def _fetch(job: SparkJob, rank: int, kind: str, num_chunks: int) -> bytes:
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as file:
        job.fetch(rank, kind, num_chunks, file)
        file.seek(0)
        return file.read()


def _load(job: SparkJob, rank: int, num_chunks: int) -> Any:
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as file:
        job.fetch(rank, "result", num_chunks, file)
        file.seek(0)
        return pickle.load(file)  # noqa: S301 - likewise


def _print_line(rank: int, line: str) -> None:
    print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)
