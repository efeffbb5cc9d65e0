"""Messages of a fit to MLflow, and a thread that sends them in order, so that no caller waits for the server.

A message can wait, be kept as JSON, and be sent later. The thread retries a message that it cannot send, until the
sender is closed; closing returns the messages that were not sent. A call that hangs is abandoned: it is in a daemon
thread, which does not keep Python from exiting.
"""

from __future__ import annotations

import base64
import itertools
import logging
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sparkdl.foreign_errors import mlflow_refusal
from sparkdl.tracking.start import current_switches, without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlflow import MlflowClient

    from sparkdl.tracking.start import BegunRun


_logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal[
    "begin", "params", "metrics", "dataset", "file", "folder", "model", "registration", "end"
]

MAX_METRICS_PER_MESSAGE = 1000
"""Maximal number of metrics per message: MLflow's limit for a batch."""

_MAX_PARAMS_PER_BATCH = 100


@dataclass(frozen=True, kw_only=True)
class Message:
    """A request to MLflow about a run.

    Attributes:
        kind: kind of the request; ``"begin"`` only has the run opened.
        content: arguments of the request, as JSON can hold them.
        folder: local folder to upload, with files or an MLflow model; None if there is none.
    """

    kind: Kind
    content: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


def join_metrics(first: Message, second: Message) -> Message | None:
    """Return one message for two messages of metrics; None if they are of another kind, or too large for one batch."""
    if not first.kind == second.kind == "metrics":
        return None
    metrics = [*first.content["metrics"], *second.content["metrics"]]
    return (
        Message(kind="metrics", content={"metrics": metrics})
        if len(metrics) <= MAX_METRICS_PER_MESSAGE
        else None
    )


class MessageRefusedError(Exception):
    """The server refuses a message, so that sending it again is useless; ``__cause__`` is MLflow's exception.

    Attributes:
        may_be_granted: whether the message is kept to be sent later: a model, or a registration that is not refused
            for good.
    """

    def __init__(self, *, may_be_granted: bool = False) -> None:
        super().__init__()
        self.may_be_granted = may_be_granted


Logged: TypeAlias = dict[str, set[tuple[int, float]]]
"""Steps and values of the metrics that a continued run already had, by name, as far as they were needed."""


def deliver(
    client: MlflowClient, run: BegunRun, message: Message, model_uri: str | None, logged: Logged
) -> str | None:
    """Send a message; return the URI of the logged model if the message was a model, else None.

    Args:
        client: client of the MLflow server.
        run: the run.
        message: message to send.
        model_uri: URI of the logged model; needed for the registration of the model.
        logged: dict to which the metrics are added that a continued run already had; they are not logged again.

    Raises:
        MessageRefusedError: if the server refuses the message.
        Exception: any exception of MLflow, if the server or its artifact store fails.
    """
    from mlflow.exceptions import MlflowException

    try:
        return _deliver(client, run, message, model_uri, logged)
    except MlflowException as error:
        refusal = mlflow_refusal(error)
        if refusal is None:
            raise
        raise MessageRefusedError(
            may_be_granted=message.kind == "model"
            or (message.kind == "registration" and not refusal.is_final)
        ) from error


def _deliver(
    client: MlflowClient, run: BegunRun, message: Message, model_uri: str | None, logged: Logged
) -> str | None:
    content, run_id = message.content, run.run_id
    if message.kind == "params":
        _log_params(client, run_id, content["params"])
    elif message.kind == "metrics":
        _log_metrics(client, run_id, content["metrics"], logged if run.is_continued else None)
    elif message.kind == "dataset":
        _log_dataset(client, run_id, content)
    elif message.kind == "file":
        _log_file(client, run_id, content["path"], base64.b64decode(content["base64"]))
    elif message.kind == "folder":
        client.log_artifacts(run_id, str(message.folder), content["path"])
    elif message.kind == "model":
        from sparkdl.tracking.mlflow_model import log_saved_flavor

        assert message.folder is not None, "a model lies in a folder"
        return log_saved_flavor(
            client, message.folder, run_id=run_id, key=content["key"], values=content["values"]
        )
    elif message.kind == "registration":
        from sparkdl.tracking.logged_model import Registration, register

        assert model_uri is not None, "a model is logged before it is registered"
        register(client, model_uri, Registration(**content["registration"]))
    elif message.kind == "end" and not run.is_joined:
        client.set_terminated(run_id, content["status"], end_time=content["end_time"])
    return None


def _log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """Log params. MLflow does not change a param: a further value is logged under a further name."""
    from mlflow.entities import Param

    before = client.get_run(run_id).data.params
    entities = []
    for name, value in params.items():
        free = next(candidate for candidate in _names_for(name) if before.get(candidate, value) == value)
        if free != name:
            _logger.log(
                logging.DEBUG if current_switches().silent else logging.WARNING,
                "The run %s has the param %s with the value %s; the further value %s is logged as %s.",
                run_id,
                name,
                before[name],
                value,
                free,
            )
        entities.append(Param(free, value))
    for start in range(0, len(entities), _MAX_PARAMS_PER_BATCH):
        client.log_batch(run_id, params=entities[start : start + _MAX_PARAMS_PER_BATCH])


def _names_for(param: str) -> Iterator[str]:
    yield param
    yield f"sparkdl.{param}"
    yield from (f"sparkdl.{param}.{number}" for number in itertools.count(2))


def _log_metrics(
    client: MlflowClient, run_id: str, metrics: list[tuple[str, float, int, int]], logged: Logged | None
) -> None:
    from mlflow.entities import Metric

    if logged is not None:
        for name in {metric[0] for metric in metrics} - logged.keys():
            logged[name] = {(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)}
        metrics = [metric for metric in metrics if (metric[3], metric[1]) not in logged[metric[0]]]
    client.log_batch(run_id, metrics=[Metric(*metric) for metric in metrics])


def _log_dataset(client: MlflowClient, run_id: str, content: Mapping[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    context = [InputTag("mlflow.data.context", content["context"])]
    client.log_inputs(run_id, [DatasetInput(dataset=Dataset(**content["dataset"]), tags=context)])


def _log_file(client: MlflowClient, run_id: str, path: str, content: bytes) -> None:
    folder, _, name = path.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as local:
        file = Path(local, name)
        file.write_bytes(content)
        client.log_artifact(run_id, str(file), folder or None)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class Sender:
    """Sends messages in order, from a thread.

    Args:
        send: function that sends a message. It raises :class:`MessageRefusedError` if the message is to be dropped with
            a warning, and any other exception if the message is to be sent again.
        warn: function that logs a warning, with the arguments of ``logging.Logger.warning``.
        name: name of the run, used in warnings.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        *,
        warn: Callable[..., None],
        name: str,
    ) -> None:
        self._send, self._warn, self._name = send, warn, name
        self._waiting: deque[Message] = deque()
        self._in_flight: Message | None = None
        self._changed = threading.Condition()
        self._num_hurries = self._num_failures = 0
        self._is_closed = self._is_warned = False
        self.last_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sparkdl-mlflow", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Queue a message, without waiting for the server."""
        with self._changed:
            last = join_metrics(self._waiting[-1], message) if self._waiting else None
            if last is not None:
                self._waiting[-1] = last
            else:
                self._waiting.append(message)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all messages are sent or the time is over; return whether they are sent.

        A message that failed before is sent again at once; if it fails again, the wait ends.
        """
        with self._changed:
            # If a message is being sent now, its sending may have begun before the server recovered.
            enough = self._num_failures + (1 if self._in_flight is None else 2)
            self._num_hurries += 1
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not (self._waiting or self._in_flight) or self._num_failures >= enough, timeout_s
            )
            return not (self._waiting or self._in_flight)

    def close(self) -> list[Message]:
        """Stop sending, and return the messages that were not sent, including the one that is being sent."""
        with self._changed:
            self._is_closed = True
            left = [*([self._in_flight] if self._in_flight is not None else []), *self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
        return left

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (message := self._next()) is not None:
            try:
                self._send(message)
            except MessageRefusedError as error:
                if self._is_closed:  # the message was kept, and its folder may no longer exist
                    return
                why = without_credentials(str(error.__cause__))
                self._warn("MLflow refuses %s of %s: %s", message.kind, self._name, why)
            except Exception as error:
                if self._is_closed:  # for the same reason
                    return
                self._note(error)
                with self._changed:
                    self._waiting.appendleft(message)
                    self._in_flight = None
                    self._num_failures += 1
                    self._changed.notify_all()
                    self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            with self._changed:
                self._in_flight = None
                self._changed.notify_all()

    def _next(self) -> Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            self._in_flight = self._waiting.popleft()
            return self._in_flight

    def _pause(self, pause_s: float) -> None:
        """Wait until the next attempt; the caller holds the lock."""
        before = self._num_hurries
        self._changed.wait_for(lambda: self._is_closed or self._num_hurries > before, pause_s)

    def _note(self, error: Exception) -> None:
        self.last_error = error
        if not self._is_warned:
            self._is_warned = True
            self._warn(
                "Logging %s to MLflow failed: %s: %s. The fit continues; what could not be sent is sent again later.",
                self._name,
                type(error).__name__,
                without_credentials(str(error)).partition("\n")[0][:300],
            )
