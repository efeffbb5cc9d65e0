"""What a fit has to say to MLflow, as messages that can wait, be kept as JSON, and be sent later. On the *driver*."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
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
        from sparkdl.tracking.registering import Registration, register

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
