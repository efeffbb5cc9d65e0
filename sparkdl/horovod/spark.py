"""``horovod.spark``: runs a function on ranks of the active Spark session, with the signatures of Horovod 0.28.1.

Replace ``import horovod.spark`` by ``import sparkdl.horovod.spark``. In place of the estimators of
``horovod.spark.torch`` use :class:`sparkdl.estimators.TorchEstimator`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from sparkdl.errors import ParamError
from sparkdl.horovod.runner import (
    NO_MPI,
    NO_RESET_LIMIT,
    SAME_PYTHON,
    elastic_limits,
    printer,
    refuse,
    refuse_both_transports,
)
from sparkdl.launch import active_session
from sparkdl.runner.horovod_runner import run_for_horovod
from sparkdl.spark.session import default_parallelism

_LISTEN = (
    "Set SPARKDL_LISTEN to the interfaces, addresses or networks in the environment of driver and executors "
    "(spark.executorEnv.SPARKDL_LISTEN)."
)
_START_TIMEOUT, _ELASTIC_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ranks of the active Spark session, and return their values in order of rank.

    Each rank takes a slot, and all have to be free at once.

    Args:
        fn: function to run; it begins with ``hvd.init()``. It is pickled with cloudpickle, as are its arguments.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        num_proc: number of ranks; ``spark.default.parallelism`` when None.
        start_timeout: seconds until all ranks must have started; ``$HOROVOD_SPARK_START_TIMEOUT`` or 600 when None.
        use_mpi: no effect: sparkdl chooses the transport.
        use_gloo: no effect: sparkdl chooses the transport.
        extra_mpi_args: refused, as there is no mpirun.
        env: environment variables for the ranks.
        stdout: stream for the lines that ranks print.
        stderr: stream for the records of Python's logging on the ranks.
        verbose: no effect.
        nics: refused; ``SPARKDL_LISTEN`` names the interfaces.
        prefix_output_with_timestamp: whether these lines begin with the time.
        executable: refused; ranks run in the Python of the executors.

    Raises:
        ParamError: if an argument has no meaning here; the message says what to use.
        SerializationError: if the function or its arguments cannot be pickled; the message names them.
        LaunchError: if there is no Spark session, or not enough slots.
        RankError: if a rank fails; the error names the first failed rank, and ``__cause__`` is its exception.
    """
    refuse("horovod.spark.run", {"extra_mpi_args": extra_mpi_args}, NO_MPI)
    refuse("horovod.spark.run", {"nics": nics or None}, _LISTEN)
    refuse("horovod.spark.run", {"executable": executable}, SAME_PYTHON)
    refuse_both_transports(use_mpi=use_mpi, use_gloo=use_gloo)
    return run_for_horovod(
        fn,
        tuple(args),
        dict(kwargs or {}),
        num_workers=_num_ranks(num_proc),
        start_timeout_s=_seconds(start_timeout, _START_TIMEOUT),
        environment=env,
        on_log=printer(stdout, stderr, with_time=prefix_output_with_timestamp),
    )


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run a function as :func:`run` does, on ranks that come and go; return the values of the last ranks.

    A function that ``hvd.elastic.run`` decorates continues from its last commit when ranks are lost or join; a function
    without one is called again.

    Args:
        fn: function to run; it begins with ``hvd.init()``.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        num_proc: number of ranks at the beginning; ``spark.default.parallelism`` when None.
        min_num_proc: minimum number of ranks; ``num_proc`` when None.
        max_num_proc: maximum number of ranks, which are started where slots are free; ``num_proc`` when None.
        start_timeout: seconds until ``min_num_proc`` ranks must have started; ``$HOROVOD_SPARK_START_TIMEOUT`` or 600
            when None.
        elastic_timeout: seconds for which a run with fewer ranks waits for others; ``$HOROVOD_ELASTIC_TIMEOUT`` or 600
            when None. The longer one of both times applies to both waits.
        reset_limit: refused; :class:`sparkdl.Runner` has ``max_restarts``.
        env: environment variables for the ranks.
        stdout: stream for the lines that ranks print.
        stderr: stream for the records of Python's logging on the ranks.
        verbose: no effect.
        nics: refused; ``SPARKDL_LISTEN`` names the interfaces.
        prefix_output_with_timestamp: whether these lines begin with the time.
        min_np: older name of ``min_num_proc``.
        max_np: older name of ``max_num_proc``.

    Raises:
        ParamError: if bounds contradict each other, or an argument has no meaning here; the message says what to use.
        SerializationError: if the function or its arguments cannot be pickled; the message names them.
        LaunchError: if there is no Spark session, or not enough slots for ``min_num_proc`` ranks.
        RankError: if code on a rank raises, or too many ranks are lost; ``__cause__`` is the rank's exception.
    """
    refuse("horovod.spark.run_elastic", {"nics": nics or None}, _LISTEN)
    refuse("horovod.spark.run_elastic", {"reset_limit": reset_limit}, NO_RESET_LIMIT)
    num_ranks = _num_ranks(num_proc)
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    return run_for_horovod(
        fn,
        tuple(args),
        dict(kwargs or {}),
        num_workers=num_ranks,
        start_timeout_s=max(
            _seconds(start_timeout, _START_TIMEOUT), _seconds(elastic_timeout, _ELASTIC_TIMEOUT)
        ),
        environment=env,
        on_log=printer(stdout, stderr, with_time=prefix_output_with_timestamp),
        **elastic_limits(num_ranks, least, most),
    )


def _num_ranks(num_proc: int | None) -> int:
    """The number of ranks that was asked for, or Spark's default parallelism.

    Raises:
        LaunchError: if there is no Spark session.
        ParamError: if the session does not tell its default parallelism.
    """
    session = active_session()
    number = default_parallelism(session) if num_proc is None else num_proc
    if number is None:
        raise ParamError("num_proc is missing, and this session does not tell its spark.default.parallelism.")
    return number


def _seconds(given: float | None, variable: str) -> float:
    """The seconds that were given, or those of an environment variable of Horovod, or 600."""
    return float(os.environ.get(variable) or 600) if given is None else given
