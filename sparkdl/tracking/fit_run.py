"""The MLflow run of one fit: opened or joined, filled, and ended with the status of the fit.

A fit queues messages and continues; a thread (:mod:`sparkdl.tracking.sender`) sends them to the server. At its end the
fit waits until all messages are sent, for a limited time. Messages that are not sent by then are kept
(:mod:`sparkdl.tracking.kept_runs`).

A :class:`RunGroup` is the run under which the runs of several Param maps are nested.
"""

from __future__ import annotations

import atexit
import base64
import importlib.util
import logging
import math
import os
import sys
import threading
import time
import uuid
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError
from sparkdl.foreign_errors import how_to_install, mlflow_refusal
from sparkdl.tracking.kept_runs import KeptRun, keep_run
from sparkdl.tracking.logged_model import Registration
from sparkdl.tracking.mlflow_model import FlavorOptions, save_flavor, values_of
from sparkdl.tracking.sender import (
    MAX_METRICS_PER_MESSAGE,
    Logged,
    Message,
    MessageRefusedError,
    Sender,
    deliver,
)
from sparkdl.tracking.start import (
    PARENT_TAG,
    BegunRun,
    Switches,
    begin_run,
    choose_store,
    current_switches,
    describe_start,
    without_credentials,
    without_notes_of_mlflow,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.entities import Run

    from sparkdl.data import Store
    from sparkdl.tracking.logged_model import LoggedDataset, LoggedModelSpec


BYTES_PER_S = 1 << 20
"""Bytes of models and checkpoints for which a fit waits one second longer."""

_WAIT_AFTER_INTERRUPT_S = 5.0
_WAIT_FOR_ANSWER_S = 5.0
_MAX_PARAM_VALUE_LENGTH = 500  # the limit of the oldest servers in use; MLflow 2.x and 3.x take 6000

_making_database = threading.Lock()
"""Held while a run is opened in a local store: if two threads found no database at once, both would create one."""

_logger = logging.getLogger(__name__)


class RunLog:
    """Makes messages of the params, metrics and files of a run.

    Args:
        put: function that takes each message, to be sent.
    """

    def __init__(self, put: Callable[[Message], object]) -> None:
        self._put = put

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log Params, with values cut to MLflow's maximal length."""
        cut = {}
        for name, value in params.items():
            text = str(value)
            is_long = len(text) > _MAX_PARAM_VALUE_LENGTH
            cut[name] = text[: _MAX_PARAM_VALUE_LENGTH - 3] + "..." if is_long else text
        self._put(Message(kind="params", content={"params": cut}))

    def log_layout(self, event: Mapping[str, Any]) -> None:
        """Log the layout that a planner has chosen on the ranks and the reason, ``code`` and ``reason`` of an event."""
        self.log_params({"parallelism": event["code"], "parallelismReason": event["reason"]})

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics, except those that are not finite."""
        now = int(time.time() * 1000)
        finite = [[name, float(value), now, step] for name, value in metrics.items() if math.isfinite(value)]
        for start in range(0, len(finite), MAX_METRICS_PER_MESSAGE):
            part = finite[start : start + MAX_METRICS_PER_MESSAGE]
            self._put(Message(kind="metrics", content={"metrics": part}))

    def log_file(self, path: str, content: bytes) -> None:
        """Write a small file into the artifacts of the run."""
        encoded = base64.b64encode(content).decode()
        self._put(Message(kind="file", content={"path": path, "base64": encoded}))


class FitRun(RunLog):
    """The MLflow run of a fit, with the thread that sends its messages; a context manager that ends the run.

    A fit joins a run that was active before, which stays open. If that already holds another fit, the fit gets a nested
    run. If MLflow has no tracking URI (no ``MLFLOW_TRACKING_URI``, no ``set_tracking_uri``, not on Databricks), it is
    set to the SQLite store ``mlflow.db`` in the working directory. A server that does not respond only leads to
    warnings.

    Args:
        store: Store that keeps the messages that cannot be sent.
        experiment: name of the experiment, which is created if missing; None for MLflow's active experiment.
        run_name: name of a new run; MLflow generates one if None.
        wait_s: seconds to wait for the server at the end, in addition to the time for large uploads.
        tags: tags of a new run. If they name the active run as the parent, the fit gets a nested run.
        group: group of runs to which this run belongs; None for none.
        key: key of the run that the fit continues, if it still exists and the fit does not join another one; None for a
            new run.
        may_join: whether the fit may be logged to the active run; otherwise it gets a nested run.

    Attributes:
        switches: options of :func:`sparkdl.autolog`.
        run_id: MLflow's id of the run; None as long as the run is not opened on the server.
        model_uri: URI of the logged model; None if the server has not accepted one.
        is_answered: set when the run is opened on the server, or the server has refused to open it.
        refusal: MLflow's exception if the server has refused to open the run.
    """

    def __init__(
        self,
        store: Store,
        *,
        experiment: str | None,
        run_name: str | None,
        wait_s: float,
        tags: Mapping[str, str] | None = None,
        group: RunGroup | None = None,
        key: str | None = None,
        may_join: bool = True,
    ) -> None:
        import mlflow

        choose_store()
        self.switches = current_switches()
        self.run_id: str | None = None
        self.model_uri: str | None = None
        self._store, self._group = store, group
        self._warn: Callable[..., None] = _logger.debug if self.switches.silent else _logger.warning
        self._tracking_uri = mlflow.get_tracking_uri()
        self.is_answered = threading.Event()
        self.refusal: Exception | None = None
        self._begun: BegunRun | None = None
        self._client: MlflowClient | None = None
        tags = {**(tags or {}), **(self.switches.extra_tags or {})}
        active = _active_run(self.switches) if group is None else group.active
        is_trial = active is not None and tags.get(PARENT_TAG) == active.info.run_id
        self.start = describe_start(
            experiment=experiment,
            name=run_name,
            tags=tags,
            active=active,
            may_join=may_join and group is None and not is_trial,
            parent_key=None if group is None else group.key,
            key=key,
        )
        self._logged: Logged = {}
        self._wait_s = wait_s
        self._refused: list[Message] = []  # refused by the server now, and kept to be sent later
        self._is_abandoned = False
        self._dataset: LoggedDataset | None = None
        name = f"the run {run_name!r}" if run_name else "the run of this fit"
        self._sender = Sender(self._send, warn=self._warn, name=name)
        super().__init__(self._sender.put)
        self._sender.put(Message(kind="begin"))
        # Garbage collection within the end of a run may close its group on the same thread.
        self._closing, self._is_closed = threading.RLock(), False
        atexit.register(
            self._end_at_exit, os.getpid()
        )  # a fit of a daemon thread does not end its run itself
        files, self._code = _of_block.get()
        for path, content in files.items():
            self.log_file(path, content)

    def __enter__(self) -> FitRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self.close("FINISHED" if kind is None else "KILLED" if is_interrupted else "FAILED")

    @property
    def place(self) -> str:
        """A sentence that says where the run is; empty as long as it is not opened on the server."""
        if self._begun is None or self._begun.experiment_id is None:
            return ""
        uri = without_credentials(self._tracking_uri)
        name = f"MLflow run {self._begun.name or self._begun.run_id}"
        if uri.startswith("http"):
            page = f"#/experiments/{self._begun.experiment_id}/runs/{self._begun.run_id}"
            return f"{name}: {uri.rstrip('/')}/{page}"
        if uri.startswith("databricks"):
            return f"{name} in experiment {self._begun.experiment_id}"
        return f"{name} ({self._begun.run_id}): mlflow ui --backend-store-uri {uri}"

    def check_begun(self) -> None:
        """Raise a ParamError if MLflow refuses to open the run; wait a few seconds if a run of the user is active."""
        if self.start.active is not None:
            self.is_answered.wait(_WAIT_FOR_ANSWER_S)
        if self.refusal is not None:
            said = without_credentials(str(self.refusal))
            raise ParamError(f"MLflow refuses the run of this fit: {said}") from self.refusal

    def log_folder(self, path: str, folder: Path) -> None:
        """Copy a local folder into the artifacts of the run; it must exist until the run is closed."""
        self._put_folder(Message(kind="folder", content={"path": path}, folder=folder), folder)

    def log_dataset(self, dataset: LoggedDataset) -> None:
        """Log the dataset of the fit as an input of the run."""
        if self.switches.log_datasets:
            self._dataset = dataset
            content = {"dataset": asdict(dataset), "context": "training"}
            self._sender.put(Message(kind="dataset", content=content))

    def log_model(self, model: LoggedModelSpec, folder: Path, registration: Registration | None) -> None:
        """Write an MLflow model below a local folder, which must exist until the run is closed, and log it."""
        if not self.switches.log_models:
            return
        options = FlavorOptions(
            has_signature=self.switches.log_model_signatures,
            has_input_example=self.switches.log_input_examples,
            code_paths=[str(path) for path in self._code] or None,
        )
        if registration is None and self.switches.registered_model_name is not None:
            registration = Registration(name=self.switches.registered_model_name)
        there = folder / "mlflow_model"
        with without_notes_of_mlflow():
            save_flavor(model, there, options)
        content: dict[str, Any] = {"key": uuid.uuid4().hex, "values": values_of(model, self._dataset)}
        self._put_folder(Message(kind="model", content=content, folder=there), there)
        if registration is not None:
            content = {"registration": asdict(registration)}
            self._sender.put(Message(kind="registration", content=content))

    def _put_folder(self, message: Message, folder: Path) -> None:
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self._wait_s += num_bytes / BYTES_PER_S
        self._sender.put(message)

    def flush(self) -> None:
        """Wait until all messages are sent, for at most the time that a fit waits; only this waits for the server."""
        self._is_abandoned = not self._wait(self._wait_s)

    def _end_at_exit(self, owner: int) -> None:
        # A forked child has neither the run nor its thread; and a daemon thread may be ending the run, without end.
        if os.getpid() == owner and self._closing.acquire(timeout=_WAIT_AFTER_INTERRUPT_S):
            try:
                self.close("KILLED")
            finally:
                self._closing.release()

    def close(self, status: str) -> None:
        """End the run, and keep the messages that were not sent; another call waits for the end of the first."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._end(status)
            finally:
                atexit.unregister(self._end_at_exit)

    def _end(self, status: str) -> None:
        if self.refusal is not None:
            said = without_credentials(str(self.refusal))
            self._warn("Nothing of this fit is logged, as MLflow refuses its run: %s", said)
        end = {"status": status, "end_time": int(time.time() * 1000)}
        self._sender.put(Message(kind="end", content=end))
        wait_s = min(self._wait_s, _WAIT_AFTER_INTERRUPT_S) if status == "KILLED" else self._wait_s
        is_sent = False
        try:
            is_sent = not self._is_abandoned and self._wait(wait_s)
        finally:  # runs also if the user interrupts the wait
            left = self._sender.close()
            left = [*self._refused, *([] if is_sent else left)]
            if left:
                self._keep(left)

    def _wait(self, timeout_s: float) -> bool:
        started = time.monotonic()
        is_sent = self._sender.wait(timeout_s)
        self._wait_s = max(0.0, self._wait_s - (time.monotonic() - started))
        return is_sent

    def _send(self, message: Message) -> None:
        """Send a message, and open the run before the first one; runs on the thread of the sender."""
        import mlflow
        from mlflow.exceptions import MlflowException

        if self.refusal is not None:
            return
        if self._begun is None:
            try:
                parent_id = None if self._group is None else self._group.parent_id()
                is_remote = self._tracking_uri.startswith("http")
                with nullcontext() if is_remote else _making_database, without_notes_of_mlflow():
                    # Once: a client asks the Spark session for the registry, which has gone if the program ends.
                    self._client = mlflow.MlflowClient(self._tracking_uri)
                    self._begun = begin_run(self._client, self.start, parent_id)
            except MlflowException as error:
                refusal = mlflow_refusal(error)
                if refusal is None or not refusal.is_final:
                    raise
                self.refusal = error
                self.is_answered.set()
                return
            self.run_id = self._begun.run_id
            self.is_answered.set()
        if message.kind == "registration" and self.model_uri is None:
            self._refused.append(message)  # the model was refused, too
            return
        assert self._client is not None, "the run was begun by it"
        try:
            uri = deliver(self._client, self._begun, message, self.model_uri, self._logged)
            self.model_uri = uri or self.model_uri
        except MessageRefusedError as error:
            if error.may_be_granted:
                self._refused.append(message)
            raise

    def _keep(self, messages: list[Message]) -> None:
        kept = KeptRun(
            tracking_uri=without_credentials(self._tracking_uri),
            start=self.start,
            run=self._begun,
            messages=messages,
            model_uri=self.model_uri,
        )
        why = "" if self._sender.last_error is None else f" ({type(self._sender.last_error).__name__})"
        try:
            place = keep_run(kept, self._store)
        except Exception as error:
            self._warn(
                "Not everything of this fit could be logged to MLflow%s, and keeping the rest failed, too: %s. The "
                "model is trained; sparkdl.mlflow.log_model(model) logs it.",
                why,
                without_credentials(str(error)),
            )
            return
        self._warn(
            "Not everything of this fit could be logged to MLflow%s. The rest is kept in %s: send it by "
            "sparkdl.mlflow.send_kept(%r) when the server is available.",
            why,
            place,
            place.rpartition("/unsent-runs/")[0],
        )


_of_block: ContextVar[tuple[Mapping[str, bytes], Sequence[Path]]] = ContextVar("of block", default=({}, ()))


@contextmanager
def log_with_fits(*, files: Mapping[str, bytes], code: Sequence[Path]) -> Iterator[None]:
    """Log files with the runs of all fits in the block, on this thread, and code with their models.

    Args:
        files: small files, by their path in the artifacts.
        code: files and folders of modules.
    """
    token = _of_block.set((files, code))
    try:
        yield
    finally:
        _of_block.reset(token)


@contextmanager
def log_of_active_run() -> Iterator[RunLog]:
    """Give the log of the run that the user has opened on this thread.

    Without such a run nothing is logged. A thread sends the messages. What the server has not taken ten seconds after
    the end is lost, with a warning.
    """
    active_run = getattr(
        sys.modules.get("mlflow"), "active_run", None
    )  # absent while another thread imports MLflow
    active = None if active_run is None else active_run()
    if active is None:
        yield RunLog(lambda _: None)
        return
    with _sending_to(active.info.run_id) as put:
        yield RunLog(put)


def add_to_run(run_id: str, metrics: Mapping[str, float], files: Mapping[str, bytes]) -> None:
    """Add metrics and files to a run that may have ended, such as that of the fit of a model.

    A thread sends them. What the server has not taken after ten seconds is lost, with a warning, and so is all without
    MLflow.
    """
    if importlib.util.find_spec("mlflow") is None:
        _logger.warning("MLflow is not installed, so nothing is added to its run %s.", run_id)
        return
    with _sending_to(run_id) as put:
        log = RunLog(put)
        log.log_metrics(0, metrics)
        for path, content in files.items():
            log.log_file(path, content)


@contextmanager
def _sending_to(run_id: str) -> Iterator[Callable[[Message], None]]:
    """Give a function that has messages sent to a run, until ten seconds after the end of the block."""
    import mlflow

    uri, begun = mlflow.get_tracking_uri(), BegunRun(run_id)

    def send(message: Message) -> None:
        deliver(mlflow.MlflowClient(uri), begun, message, None, {})

    sender = Sender(send, warn=_logger.warning, name=f"run {run_id}")
    try:
        yield sender.put
    finally:
        sender.wait(_WAIT_AT_END_S)
        if left := sender.close():
            kinds = ", ".join(sorted({message.kind for message in left}))
            _logger.warning("MLflow has not taken %d messages (%s) of run %s.", len(left), kinds, run_id)


def _active_run(switches: Switches) -> Run | None:
    import mlflow

    return None if switches.exclusive else mlflow.active_run()


def is_tracking(mode: str) -> bool:
    """Return whether fits are tracked: if the mode is ``"on"``, or ``"auto"`` with mlflow and without `disable`.

    Raises:
        ParamError: if the mode is ``"on"`` and mlflow is not installed.
    """
    if mode == "off":
        return False
    if importlib.util.find_spec("mlflow") is None:
        if mode == "on":
            raise ParamError(
                f"Param tracking is 'on' and mlflow is not installed. {how_to_install('mlflow', 'mlflow')} Or set "
                "tracking to 'off'."
            )
        return False
    return mode == "on" or not current_switches().disable


_WAIT_FOR_PARENT_S = 60.0
_WAIT_AT_END_S = 10.0


class RunGroup:
    """The run under which other runs are nested: the user's active run, or a new run, which :meth:`close` ends.

    Attributes:
        active: the user's active run; None if a new run was opened.
        key: key of the new run; None if the user's run is used.
    """

    def __init__(
        self, store: Store, *, experiment: str | None, name: str, wait_s: float = _WAIT_AT_END_S
    ) -> None:
        self.active = _active_run(current_switches())
        self._run: FitRun | None = None
        if self.active is None:
            self._run = FitRun(store, experiment=experiment, run_name=name, wait_s=wait_s)
        self.key: str | None = None if self._run is None else self._run.start.key
        self._is_closed = False
        self._lock = threading.Lock()

    def parent_id(self) -> str:
        """Return the id of the parent run. The senders of the nested runs call this on their threads.

        Raises:
            TimeoutError: if the run was not opened on the server in time.
        """
        if self.active is not None:
            return str(self.active.info.run_id)
        assert self._run is not None, "opened as no run of the user is active"
        if not self._run.is_answered.wait(_WAIT_FOR_PARENT_S):
            raise TimeoutError("the run under which this one is nested could not be opened")
        if self._run.refusal is not None:
            raise self._run.refusal
        assert self._run.run_id is not None
        return self._run.run_id

    def close(self, status: str = "FINISHED") -> None:
        """End the new run with a status; may be called again."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if self._run is not None and not was_closed:
            self._run.close(status)
