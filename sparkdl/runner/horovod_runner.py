"""``HorovodRunner``: the class of Databricks with its signature. Runs on the *driver*.

What it does is documented at https://databricks.github.io/spark-deep-learning; where that leaves a choice, the
docstring says what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.errors import LaunchError, ParamError
from sparkdl.launch import active_session
from sparkdl.runner.runner import Runner

VERBOSITIES = ("all", "log_callback_only")

SLOT_TIMEOUT_S = 24 * 60 * 60.0
"""How long a run waits for ``np`` free slots, for which Databricks names no limit."""

OPERATION_TIMEOUT_S = 24 * 60 * 60.0
"""How long ranks wait for each other, for which Horovod names no limit: one may download data for the others, say."""

SILENCE_TIMEOUT_S = 240.0
"""How long a process or a host may give no sign of life, which those that work or wait go on giving."""


class HorovodRunner:
    """Runs a function that was written for Horovod on ranks.

    A notebook for Databricks' class runs after ``import horovod.torch as hvd`` became
    ``import sparkdl.horovod.torch as hvd``; no MPI needs to be installed.

    Args:
        np: how many processes. If positive, as many tasks of the active Spark session run them, all at once: a run
            waits until so many slots are free, and fails if the cluster has fewer. If negative, ``-np`` processes of
            the driver's machine run them, without Spark; -1 is one process there.
        driver_log_verbosity: ``"all"`` shows all that processes on the cluster print; ``"log_callback_only"`` only what
            they say by :func:`sparkdl.horovod.log_to_driver`. Processes on the driver's machine always show all.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        self.num_processor = np  # the name that Databricks' class has for it
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run ``main(**kwargs)`` on every rank and return what it returned on rank 0.

        Args:
            main: a function; it begins with ``hvd.init()``.
            kwargs: its keyword arguments. They and the function travel by cloudpickle.

        Raises:
            ParamError: if ``np`` is 0, or ``driver_log_verbosity`` is unknown.
            SerializationError: if the function or its arguments cannot be pickled; the message names them.
            LaunchError: if there is no Spark session, or not enough slots.
            RankError: if a rank fails; it names the first one, and its ``__cause__`` is that rank's exception.
            HangError: if a rank's process or host gives no sign of life for four minutes. Others may wait for it for
                a day as long as it does; each operation that waits a minute is warned of.
        """
        self._check(main)
        on_driver = self.num_processor < 0
        runner = Runner(
            num_workers=abs(self.num_processor),
            local=on_driver,
            start_timeout_s=SLOT_TIMEOUT_S,
            operation_timeout_s=OPERATION_TIMEOUT_S,
        )
        return runner._run(
            main,
            (),
            kwargs,
            sees_gpus_of_host=not on_driver,
            silence_timeout_s=SILENCE_TIMEOUT_S,
            only_for_driver=not on_driver and self.driver_log_verbosity != "all",
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
                "np=0, which once meant all slots of the cluster, is no longer a number of processes. Give that number."
            )
        if self.num_processor > 0:
            try:
                active_session()
            except LaunchError as error:
                raise LaunchError(
                    f"HorovodRunner(np={self.num_processor}) runs on a cluster, and there is no active Spark session. "
                    f"Create it first, or use np=-{self.num_processor} for processes of this machine."
                ) from error
