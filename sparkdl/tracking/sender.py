"""Messages of a fit to MLflow, and a thread that sends them in order, so that no caller waits for the server.

A message can wait, be kept as JSON, and be sent later. What the thread cannot send it retries until it is closed;
then it returns what was not sent. A call that hangs is abandoned in a daemon thread, which does not keep Python from
exiting.
"""

from __future__ import annotations

import base64
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sparkdl.tracking.start import without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlflow import MlflowClient


Kind: TypeAlias = Literal[
    "params", "metrics", "tags", "dataset", "file", "folder", "model", "registration", "end"
]

KINDS_OF_MODELS: tuple[Kind, ...] = ("model", "registration")
"""What is too dear to be left out where a server refuses it: permissions can be given."""

MAX_METRICS_PER_MESSAGE = 1000
"""MLflow's own limit for a batch."""

_MAX_PARAMS_PER_BATCH = 100
# Not BAD_REQUEST, which MLflow says also of a database that is gone.
_REFUSALS = frozenset(
    {
        "FEATURE_DISABLED",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "PERMISSION_DENIED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_LIMIT_EXCEEDED",
    }
)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One thing to say of a run.

    Attributes:
        kind: what it is.
        content: what JSON can hold; by kind the arguments of :func:`deliver`'s helpers.
        folder: local folder that goes with it: of files, or of a model of MLflow.
    """

    kind: Kind
    content: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


def joined(first: Message, second: Message) -> Message | None:
    """Return one message for two that follow each other, where MLflow takes them at once: metrics."""
    if not first.kind == second.kind == "metrics":
        return None
    metrics = [*first.content["metrics"], *second.content["metrics"]]
    return (
        Message(kind="metrics", content={"metrics": metrics})
        if len(metrics) <= MAX_METRICS_PER_MESSAGE
        else None
    )


def file_message(path: str, content: bytes) -> Message:
    """Return the message that puts a small file into the artifacts of the run, at a path there."""
    return Message(kind="file", content={"path": path, "base64": base64.b64encode(content).decode()})


def is_refusal(error: Exception) -> bool:
    """Return whether a server that raised this would raise it for the same message again, however often it is sent."""
    return getattr(error, "error_code", None) in _REFUSALS


def deliver(client: MlflowClient, run_id: str, message: Message, model_uri: str | None = None) -> str | None:
    """Say it to the server; return the URI of the model that it logged.

    Args:
        client: of the server.
        run_id: of the run.
        message: what is said.
        model_uri: of the model that is registered.

    Raises:
        Exception: what MLflow raises when the server or its artifact store does not take it.
    """
    content = message.content
    if message.kind == "params":
        _log_params(client, run_id, content["params"])
    elif message.kind == "metrics":
        _log_metrics(client, run_id, content["metrics"])
    elif message.kind == "tags":
        for name, value in content["tags"].items():
            client.set_tag(run_id, name, value)
    elif message.kind == "dataset":
        _log_dataset(client, run_id, content)
    elif message.kind == "file":
        _log_file(client, run_id, content["path"], base64.b64decode(content["base64"]))
    elif message.kind == "folder":
        client.log_artifacts(run_id, str(message.folder), content["path"])
    elif message.kind == "model":
        from sparkdl.tracking.flavor import log_saved_flavor

        assert message.folder is not None, "a model lies in a folder"
        return log_saved_flavor(client, message.folder, run_id=run_id, key=content["key"])
    elif message.kind == "registration":
        from sparkdl.tracking.logged_model import Registration, register

        assert model_uri is not None, "a model is logged before it is registered"
        register(client, model_uri, Registration(**content["registration"]))
    else:
        client.set_terminated(run_id, content["status"], end_time=content["end_time"])
    return None


def _log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    entities = [Param(name, value) for name, value in params.items()]
    for start in range(0, len(entities), _MAX_PARAMS_PER_BATCH):
        client.log_batch(run_id, params=entities[start : start + _MAX_PARAMS_PER_BATCH])


def _log_metrics(client: MlflowClient, run_id: str, metrics: list[tuple[str, float, int, int]]) -> None:
    from mlflow.entities import Metric

    client.log_batch(run_id, metrics=[Metric(*each) for each in metrics])


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


MAX_WAITING = 10_000
"""Messages that wait at most; at four a second, that is more than half an hour."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class RefusedError(Exception):
    """The server will not take a message, however often it is sent; its ``__cause__`` says why."""


class Sender:
    """Sends messages by a function, one after the other.

    Args:
        send: sends one. It raises :class:`RefusedError` for one that is never taken, which is then left out with a
            warning, and anything else for one that is to be tried again.
        spill: takes messages that are more than may wait; called on the thread of :meth:`put`.
        warn: takes warnings, as a logger does.
        name: of what is told, for warnings.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        *,
        spill: Callable[[list[Message]], None],
        warn: Callable[..., None],
        name: str,
    ) -> None:
        self._send, self._spill, self._warn, self._name = send, spill, warn, name
        self._waiting: deque[Message] = deque()
        self._in_flight: Message | None = None
        self._changed = threading.Condition()
        self._num_hurries = self._num_failures = 0
        self._is_closed = self._is_warned = False
        self.last_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sparkdl-mlflow", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Have a message sent; returns at once."""
        with self._changed:
            last = joined(self._waiting[-1], message) if self._waiting else None
            if last is not None:
                self._waiting[-1] = last
            else:
                self._waiting.append(message)
            spilled = []
            if len(self._waiting) > MAX_WAITING:
                spilled = [self._waiting.popleft() for _ in range(MAX_WAITING // 2)]
            self._changed.notify_all()
        if spilled:
            self._spill(spilled)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is sent, for so long; return whether it is.

        What failed before is tried again at once; when that fails too, there is nothing to wait for.
        """
        with self._changed:
            # What is being sent now may have begun when things were worse.
            enough = self._num_failures + (1 if self._in_flight is None else 2)
            self._num_hurries += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_done or self._num_failures >= enough, timeout_s)
            return self._is_done

    @property
    def _is_done(self) -> bool:
        return not self._waiting and self._in_flight is None

    def close(self) -> list[Message]:
        """Send nothing more, and return what was not sent, what is being sent among it."""
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
            except RefusedError as error:
                if self._is_closed:  # it was kept, and what it sends from may be gone by now
                    return
                why = without_credentials(str(error.__cause__))
                self._warn("MLflow does not take %s of %s: %s", message.kind, self._name, why)
            except Exception as error:
                if self._is_closed:  # likewise
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
        """Wait until it is time to try again; with the lock."""
        before = self._num_hurries
        self._changed.wait_for(lambda: self._is_closed or self._num_hurries > before, pause_s)

    def _note(self, error: Exception) -> None:
        self.last_error = error
        if not self._is_warned:
            self._is_warned = True
            self._warn(
                "MLflow cannot be told of %s: %s: %s. The fit goes on; what could not be sent is tried again.",
                self._name,
                type(error).__name__,
                _first_line(error),
            )


def _first_line(error: Exception) -> str:
    return (without_credentials(str(error)).splitlines() or [""])[0][:300]
