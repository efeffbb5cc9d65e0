"""``Runner``: runs a training function or script on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sparkdl.checkpoint.commit_place import SETTING, USER, CommitPlace
from sparkdl.checks import check_counts
from sparkdl.data import Store
from sparkdl.data.files.filesystems import absolute_url
from sparkdl.errors import LaunchError, ParamError, did_you_mean
from sparkdl.launch import (
    Restarts,
    Start,
    active_session,
    hold_place,
    run_on_local_ranks,
    run_on_ranks,
    run_with_restarts,
)
from sparkdl.launch.elastic.roster import MAX_RESTARTS, ElasticLimits
from sparkdl.runner.on_rank import IMPORTED_FIRST, RankSetup, Returned, run_on_rank
from sparkdl.runner.rank_logging import OnLine, level_number, line_reader
from sparkdl.runner.script import PackedCall, Script, read_script
from sparkdl.spark.jobs import jobs_of, name_of
from sparkdl.tracking import log_of_active_run

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from sparkdl.data.files.lease import SoleLease
    from sparkdl.monitor import Monitor
    from sparkdl.monitor.board import Board

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class Runner:
    """Runs a function or a script in one process per rank, all at once.

    On the ranks ``torch.distributed`` is initialized with the backend ``"sparkdl"`` unless ``init_torch`` is False, the
    variables of ``torchrun`` are set, :func:`sparkdl.collective.current_communicator` returns the communicator,
    ``hvd.init()`` of :mod:`sparkdl.horovod.torch` joins the world, and mpi4py has all ranks in ``MPI.COMM_WORLD``. A
    failing rank ends all of them within seconds. Arguments are checked by :meth:`run`.

    Args:
        num_workers: number of ranks. On a cluster each takes a slot, and all have to be free at once.
        gpus_per_worker: number of GPUs of each rank; it sees no other GPUs. Collectives of CUDA tensors then use NCCL.
        threads_per_worker: number of threads in which torch and other libraries compute on each rank. When None,
            ``OMP_NUM_THREADS`` if it is set, otherwise the cores of a task (``spark.task.cpus``, or ``resources``), and
            for local ranks their share of the machine. See :func:`~sparkdl.launch.run_on_ranks`.
        local: run the ranks as processes of this machine, without Spark.
        spark: classic or Connect session; the active one when None.
        transport: transport of the communicator; see :func:`~sparkdl.launch.run_on_ranks`.
        init_torch: whether ``torch.distributed`` is initialized before the function is called. False for a function or
            script that calls ``torch.distributed.init_process_group()`` itself, or whose trainer does. That call
            connects the ranks without an address, with the backend ``"sparkdl"``, ``"gloo"`` or any other.
        wire: data type in which sums and averages of float32 are sent between hosts: ``float32``, ``bfloat16`` or
            ``float16``. It applies to CUDA tensors only with ``transport="hierarchical"``, as NCCL does not convert.
        resources: ``pyspark.resource.ResourceProfile`` of each rank's task, if it differs from the application's
            default. The profile may have only task requests; needs Spark 4.0 and a cluster.
        environment: environment variables for the rank processes.
        modules: libraries that the function needs and that take long to import; they are already imported in the ranks
            of the next run.
        max_restarts: maximum number of restarts of the ranks after a loss: a process that was killed, an executor or a
            host that went away, a rank that hung, or a connection that was cut.
        max_retries: maximum number of restarts of the ranks after code on one of them raised, or a connection was cut
            when no ``max_restarts`` are left. In an elastic run: how often in succession ranks meet again after a
            connection was cut, 3 times when 0; code that raises ends the run.
        min_workers: minimum number of ranks after a restart, if slots are gone; ``num_workers`` when None, or 1 if the
            run is elastic.
        elastic: whether the run continues with the ranks that are left when others are lost, and takes in new ones, up
            to ``max_workers``. The function is then called again on all ranks, in the same processes, and a
            :class:`~sparkdl.runner.TrainingState` that it makes has the last commit of the ranks that are left.
            ``max_restarts``, if it is not 0, limits how many lost ranks are started again. See docs/elastic.md.
        max_workers: maximum number of ranks of an elastic run; ``num_workers`` when None.
        group_size: number of ranks that an elastic run loses and starts together, such as those that share one copy of
            a model; the numbers of ranks are multiples of it. See ``by_replica`` of
            :meth:`sparkdl.parallel.Parallelism.lay_out`.
        checkpoint_dir: folder or URL, as for a Store, to which rank 0 writes the commits of a state (see
            :class:`~sparkdl.runner.TrainingState`), so that a later run continues from the last commit. When None,
            commits are kept until the run ends, if restarts or retries are possible: in the default Store, which driver
            and executors have to reach, or on this machine for local ranks.
        log_level: level of the root logger on the ranks, as a number or a name. When None, it is not set: as in any
            Python program warnings are shown, until the function configures logging.
        on_log: called with rank, line and level for each line that the ranks print or log; the level is None for lines
            that were printed. When None, lines are printed with ``[rank N]`` before them.
        start_timeout_s: seconds until all ranks must have started, for which slots have to be free. Without effect on
            local ranks.
        operation_timeout_s: default deadline of a collective in seconds.
        hang_timeout_s: seconds after which a rank that others wait for, or that does not respond, counts as hanging and
            therefore as lost; four fifths of ``operation_timeout_s`` when None. See
            :func:`~sparkdl.launch.run_on_ranks`.
        monitor: how the ranks are watched, a :class:`sparkdl.monitor.Monitor`; not at all when None. The function
            reports its steps by :func:`sparkdl.monitor.end_step`. See docs/monitoring.md.
    """

    num_workers: int = 1
    gpus_per_worker: int = 0
    threads_per_worker: int | None = None
    local: bool = False
    spark: SparkSession | None = None
    transport: str = "auto"
    wire: str = "float32"
    init_torch: bool = True
    resources: ResourceProfile | None = None
    environment: Mapping[str, str] | None = None
    modules: Sequence[str] = ()
    max_restarts: int = 0
    max_retries: int = 0
    min_workers: int | None = None
    elastic: bool = False
    max_workers: int | None = None
    group_size: int = 1
    checkpoint_dir: str | os.PathLike[str] | None = None
    log_level: int | str | None = None
    on_log: OnLine | None = None
    start_timeout_s: float = 300.0
    operation_timeout_s: float = 300.0
    hang_timeout_s: float | None = None
    monitor: Monitor | None = None

    def run(self, train: Callable[..., Any] | str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function or a script on every rank and return its value on rank 0.

        Args:
            train: a function, or the path of a file ``*.py`` on the driver, whose source is sent to the ranks.
            args: positional arguments of the function, or words of the script's command line.
            kwargs: keyword arguments of the function. For a script ``name=value`` becomes ``--name value``, with the
                name as it is spelled; ``name=True`` becomes ``--name``, a list ``--name value value``, and False and
                None are left out.

        Returns:
            The value of rank 0, of any size; None for a script.

        Raises:
            ParamError: if an argument of the Runner has an invalid value, or there is no such script.
            SerializationError: if the function or its arguments cannot be pickled; the message names them. Or if the
                value of a rank cannot be loaded on the driver.
            LaunchError: if there is no Spark session, or the ranks cannot be started.
            RankError: if a rank fails; the error names the first failed rank, and ``__cause__`` is its exception.
            HangError: if a rank hangs; the error names the rank and where it was. The log has the stacks of all ranks.
            StoreError: if the commits of a state cannot be written.
        """
        return self._run(train, args, kwargs)[0]

    def run_all(
        self, train: Callable[..., Any] | str | os.PathLike[str], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Like :meth:`run`, but return the values of all ranks, in the order of the ranks."""
        return self._run(train, args, kwargs, returns_all=True)

    def _run(
        self,
        train: Callable[..., Any] | str | os.PathLike[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        returns_all: bool = False,
        sees_gpus_of_host: bool = False,
        only_for_driver: bool = False,
        silence_timeout_s: float | None = None,
    ) -> list[Any]:
        self._check()
        log_level = level_number(self.log_level)
        call: PackedCall | Script
        if callable(train) and not isinstance(train, str | os.PathLike):
            call = PackedCall(train, args, kwargs)
        else:
            call = read_script(train, args, kwargs)
        session = self._session()
        with self._hold_commits(is_local=session is None) as lease, ExitStack() as stack:
            run_log = stack.enter_context(log_of_active_run())
            board: Board | None = None
            if self.monitor is not None:
                board = stack.enter_context(self.monitor.on_driver(name_of(train), run_log.log_metrics))

            def handle(_: int, event: Mapping[str, Any]) -> None:
                if event.get("kind") == "layout":  # of choose_layout
                    run_log.log_layout(event)
                elif board is not None:
                    board.handle(event)

            setup = RankSetup(
                returns_all=returns_all,
                gpus=self.gpus_per_worker,
                sees_gpus_of_host=sees_gpus_of_host,
                log_level=log_level,
                operation_timeout_s=self.operation_timeout_s,
                init_torch=self.init_torch,
                max_restarts=self.max_restarts + self.max_retries,
                monitor=self.monitor,
            )
            launch = partial(
                self._launcher(session),
                on_log=line_reader(self.on_log, only_for_driver=only_for_driver),
                on_event=handle,
                silence_timeout_s=silence_timeout_s,
            )

            def start_ranks(start: Start) -> list[Returned]:
                commits = None if lease is None else CommitPlace(lease.url, start.lease)
                of_start = replace(setup, restart_count=start.number, commits=commits)
                return launch(run_on_rank, of_start, call, num_ranks=start.num_ranks, **start.options)

            with jobs_of(f"run {name_of(train)}"):
                returned = run_with_restarts(
                    start_ranks,
                    self._restarts(),
                    lease=lease,
                    spark=session,
                    num_ranks=self.num_workers,
                    where=lambda: (
                        "the beginning" if lease is None else CommitPlace(lease.url, lease.name).position()
                    ),
                    resources=self.resources,
                )
        if len(returned) > 1 and not any(outcome is None or outcome.has_met for outcome in returned):
            logger.warning(
                "No rank opened the communicator or initialized torch.distributed with other ranks. If the function "
                "trains a model, its %d ranks trained %d unconnected models: call "
                "torch.distributed.init_process_group() in it, or leave out init_torch=False.",
                len(returned),
                len(returned),
            )
        return [None if outcome is None else outcome.value for outcome in returned]

    def _hold_commits(self, *, is_local: bool) -> AbstractContextManager[SoleLease | None]:
        """Hold the folder for the commits of this run alone: ``checkpoint_dir``, or one that is removed at the end.

        Without ``checkpoint_dir``, and if ranks are not restarted, there is none.

        Args:
            is_local: whether all ranks run on this machine; otherwise the removed folder is in the default Store.

        Raises:
            StoreError: if the folder cannot be written.
            CheckpointsInUseError: if another run uses the folder.
        """

        def temporary() -> AbstractContextManager[str]:
            if is_local:
                return TemporaryDirectory(prefix="sparkdl-commits-", ignore_cleanup_errors=True)
            return Store.default().scratch_folder("commits")

        return hold_place(
            None if self.checkpoint_dir is None else absolute_url(self.checkpoint_dir),
            temporary if self.max_restarts or self.max_retries else None,
            logger.warning,
            user=USER,
            setting=SETTING,
        )

    def _launcher(self, session: SparkSession | None) -> Callable[..., list[Any]]:
        """The function that starts ranks."""
        start: Callable[..., list[Any]] = run_on_local_ranks
        if session is not None:
            start = partial(
                run_on_ranks, spark=session, resources=self.resources, start_timeout_s=self.start_timeout_s
            )
        return partial(
            start,
            transport=self.transport,
            wire=self.wire,
            gpus_per_rank=self.gpus_per_worker,
            threads_per_rank=self.threads_per_worker,
            mpi=True,
            environment=self.environment,
            modules=(*IMPORTED_FIRST, *self.modules),
            operation_timeout_s=self.operation_timeout_s,
            hang_timeout_s=self.hang_timeout_s,
        )

    def _restarts(self) -> Restarts:
        return Restarts(
            max_restarts=self.max_restarts,
            max_retries=self.max_retries,
            min_ranks=self._least(),
            start_timeout_s=self.start_timeout_s,
            what="run",
            advice="Lower min_workers, or run again when there are more.",
            elastic=self._elastic_limits() if self.elastic else None,
        )

    def _elastic_limits(self) -> ElasticLimits:
        return ElasticLimits(
            least=self._least(),
            most=self.num_workers if self.max_workers is None else self.max_workers,
            max_restarts=self.max_restarts or MAX_RESTARTS,
            max_retries=self.max_retries or ElasticLimits.max_retries,
            group_size=self.group_size,
        )

    def _least(self) -> int:
        if self.min_workers is not None:
            return self.min_workers
        return self.group_size if self.elastic else self.num_workers

    def _session(self) -> SparkSession | None:
        """The session whose cluster runs the ranks; None for processes of this machine."""
        if self.local:
            if self.resources is not None or self.spark is not None:
                name = "spark" if self.resources is None else "resources"
                raise ParamError(f"{name} has no meaning with local=True, which does not use Spark. Omit it.")
            return None
        try:
            return self.spark or active_session()
        except LaunchError as error:
            raise LaunchError(f"{error} With local=True the ranks are processes of this machine.") from None

    def _check(self) -> None:
        check_counts(least=1, num_workers=self.num_workers)
        check_counts(
            least=0,
            gpus_per_worker=self.gpus_per_worker,
            max_restarts=self.max_restarts,
            max_retries=self.max_retries,
        )
        if self.monitor is not None and not hasattr(self.monitor, "on_driver"):
            raise ParamError(
                f"monitor is {self.monitor!r}; give a sparkdl.monitor.Monitor, as Monitor(seconds=5)."
            )
        if self.min_workers is not None and not 1 <= self.min_workers <= self.num_workers:
            raise ParamError(
                f"min_workers={self.min_workers} must be between 1 and num_workers={self.num_workers}."
            )
        if self.group_size != 1 and (self.group_size < 1 or not self.elastic):
            raise ParamError(f"group_size={self.group_size} must be at least 1, and needs elastic=True.")
        if self.max_workers is not None and not (self.elastic and self.max_workers >= self.num_workers):
            raise ParamError(
                f"max_workers={self.max_workers} must be at least num_workers={self.num_workers}, and needs "
                "elastic=True."
            )


F = TypeVar("F", bound=Callable[..., Any])


def distributed(*_unnamed: object, **settings: Any) -> Callable[[F], F]:
    """Return a decorator for a function that is to run on ranks when it is called.

    Example::

        @distributed(num_workers=4)
        def train(learning_rate):
            ...
            return loss

        loss = train(0.1)

    A call returns the value of rank 0, as :meth:`Runner.run` does. The function itself, for a call in this process, is
    ``train.__wrapped__``.

    Args:
        settings: settings of a :class:`Runner`.

    Raises:
        ParamError: if ``settings`` has a name that a Runner does not have, or the parentheses are missing.
    """
    if _unnamed:
        name = getattr(_unnamed[0], "__name__", _unnamed[0])
        raise ParamError(
            f"distributed takes settings by name, got {name}. Write @distributed(num_workers=4)."
        )
    known = [field.name for field in fields(Runner)]
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"They are: {', '.join(known)}.")
            raise ParamError(f"A Runner has no setting {name!r}. {hint}")

    def decorate(function: F) -> F:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return Runner(**settings).run(function, *args, **kwargs)

        return cast("F", run)

    return decorate
