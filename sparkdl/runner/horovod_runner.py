"""``HorovodRunner``: the class of Databricks, with the same signature.

It follows https://databricks.github.io/spark-deep-learning; the docstrings describe what that page leaves open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.errors import LaunchError, ParamError
from sparkdl.launch import active_session
from sparkdl.runner.runner import Runner

VERBOSITIES = ("all", "log_callback_only")

SLOT_TIMEOUT_S = 24 * 60 * 60.0
"""How long a run waits for ``np`` free slots; Databricks documents no limit."""

OPERATION_TIMEOUT_S = 24 * 60 * 60.0
"""How long ranks wait for each other, for example while one downloads data; Horovod documents no limit."""

SILENCE_TIMEOUT_S = 240.0
"""How long a process or a host may send no heartbeat; processes that compute or wait do send heartbeats."""


class HorovodRunner:
    """Runs a function that was written for Horovod on ranks.

    To run a notebook for Databricks' class, replace ``import horovod.torch as hvd`` by
    ``import sparkdl.horovod.torch as hvd``; MPI need not be installed.

    Args:
        np: number of processes. If positive, they run as ``np`` tasks of the active Spark session, all at once: a run
            waits until ``np`` slots are free, and fails if the cluster has fewer. If negative, ``-np`` processes run on
            the driver's machine, without Spark; -1 is one process there.
        driver_log_verbosity: ``"all"`` shows the whole output of processes on the cluster, ``"log_callback_only"`` only
            the messages of :func:`sparkdl.horovod.log_to_driver`. The output of processes on the driver's machine is
            always shown.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        self.num_processor = np  # the attribute of Databricks' class
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run ``main(**kwargs)`` on every rank and return its value on rank 0.

        Args:
            main: function to run; it begins with ``hvd.init()``.
            kwargs: keyword arguments of the function. The function and its arguments are pickled with cloudpickle.

        Raises:
            ParamError: if ``np`` is 0, or ``driver_log_verbosity`` is unknown.
            SerializationError: if the function or its arguments cannot be pickled; the message names them.
            LaunchError: if there is no Spark session, or not enough slots.
            RankError: if a rank fails; the error names the first failed rank, and ``__cause__`` is its exception.
            HangError: if a rank's process or host sends no heartbeat for four minutes. As long as heartbeats arrive,
                other ranks may wait for the rank for 19 hours; each operation that waits a minute logs a warning.
        """
        self._check(main)
        on_driver = self.num_processor < 0
        return run_for_horovod(
            main,
            (),
            kwargs,
            returns_all=False,
            only_for_driver=not on_driver and self.driver_log_verbosity != "all",
            num_workers=abs(self.num_processor),
            local=on_driver,
            start_timeout_s=SLOT_TIMEOUT_S,
        )[0]

    def _check(self, main: Any) -> None:
        if not callable(main):
            raise ParamError(
                f"HorovodRunner.run takes a function, and main is {main!r}. Runner runs scripts, too."
            )
        if self.driver_log_verbosity not in VERBOSITIES:
            raise ParamError(
                f"driver_log_verbosity={self.driver_log_verbosity!r} is unknown; it may be one of "
                f"{', '.join(VERBOSITIES)}."
            )
        if self.num_processor == 0:
            raise ParamError(
                "np=0, which once meant all slots of the cluster, is not supported. Give the number of processes."
            )
        if self.num_processor > 0:
            try:
                active_session()
            except LaunchError as error:
                raise LaunchError(
                    f"HorovodRunner(np={self.num_processor}) runs on a cluster, and there is no active Spark session. "
                    f"Create it first, or use np=-{self.num_processor} for processes of this machine."
                ) from error


def run_for_horovod(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    returns_all: bool = True,
    only_for_driver: bool = False,
    **options: Any,
) -> list[Any]:
    """Run a function that was written for Horovod on ranks, and return their values in order of rank.

    Ranks wait for each other as long as under Horovod. Unless ranks come and go, each rank on a cluster sees the GPUs
    of all ranks of its host, as the function chooses its own by ``hvd.local_rank()``.

    Args:
        function: function to run on the ranks.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        returns_all: whether the values of all ranks are wanted, or only rank 0's; others are then None.
        only_for_driver: whether to show only messages of :func:`sparkdl.horovod.log_to_driver`.
        options: arguments of :class:`Runner`.
    """
    runner = Runner(operation_timeout_s=OPERATION_TIMEOUT_S, **options)
    return runner._run(
        function,
        args,
        kwargs,
        returns_all=returns_all,
        sees_gpus_of_host=not (runner.local or runner.elastic),
        silence_timeout_s=SILENCE_TIMEOUT_S,
        only_for_driver=only_for_driver,
    )
