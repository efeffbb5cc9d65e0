"""What could not be sent of a run, as a folder of files that can be sent later. Runs on the *driver*.

A folder holds the folders of models and checkpoints, and last of all ``run.json``: one without it is not complete, and
is never read. Where it lies is the business of a :class:`Shelf`, as this package knows no Store.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.errors import StoreError
from sparkdl.tracking.messages import Message, deliver, is_refusal
from sparkdl.tracking.run_start import BegunRun, RunStart, begin_run, find_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlflow import MlflowClient

FORMAT = 1
RUN_FILE = "run.json"

_logger = logging.getLogger(__name__)


class Shelf(Protocol):
    """Holds folders of kept runs."""

    def put(self, name: str, folders: Mapping[str, Path], files: Mapping[str, bytes]) -> str:
        """Copy local folders and then files, each of which appears as a whole, into a folder; return its URL."""

    def names(self) -> list[str]:
        """Return the names of all folders, the oldest first."""

    def get(self, name: str, into: Path) -> None:
        """Copy a folder to a local one."""

    def remove(self, name: str) -> None:
        """Remove a folder."""


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """What is left to say of a run.

    Attributes:
        tracking_uri: of the server that it was meant for.
        start: how the run begins.
        run: the run, where the server had begun it.
        messages: in order; the folder of each is a name inside the kept folder.
    """

    tracking_uri: str
    start: RunStart
    run: BegunRun | None
    messages: Sequence[Message]


def keep_run(kept: KeptRun, shelf: Shelf, *, part: int = 0) -> str:
    """Keep what is left to say, and return where.

    Args:
        kept: the run.
        shelf: where.
        part: number among what is kept of this run, which is sent in this order.

    Raises:
        StoreError: if it cannot be written.
    """
    folders, messages = {}, []
    for number, message in enumerate(kept.messages):
        name = None if message.folder is None else f"{number:04}"
        if message.folder is not None and name is not None:
            folders[name] = message.folder
        messages.append({"kind": message.kind, "content": message.content, "folder": name})
    content = {
        "format": FORMAT,
        "tracking_uri": kept.tracking_uri,
        "start": asdict(kept.start),
        "run": None if kept.run is None else asdict(kept.run),
        "messages": messages,
    }
    name = f"{kept.start.start_time:015}-{kept.start.key[:12]}-{part:04}"
    return shelf.put(name, folders, {RUN_FILE: json.dumps(content).encode()})


@dataclass(frozen=True, kw_only=True)
class SentRun:
    """A kept run that was sent.

    Attributes:
        run_id: of MLflow.
        model_uri: of the model that was sent, if there was one.
        error: why it could not be sent, and stays kept; None where it was.
    """

    run_id: str | None
    model_uri: str | None = None
    error: str | None = None


def send_kept_runs(shelf: Shelf, tracking_uri: str | None = None) -> list[SentRun]:
    """Send all kept runs, the oldest first; each is removed once it is sent.

    Args:
        shelf: where they lie.
        tracking_uri: of another server than the one that they were meant for.

    Raises:
        StoreError: if the shelf cannot be read or written.
    """
    sent = []
    for name in shelf.names():
        with tempfile.TemporaryDirectory(prefix="sparkdl-kept-") as folder:
            shelf.get(name, Path(folder))
            kept = _read(Path(folder), tracking_uri)
            if kept is None:
                continue
            one = _send(kept)
        if one.error is None:
            shelf.remove(name)
        sent.append(one)
    return sent


def _send(kept: KeptRun) -> SentRun:
    import mlflow

    before = mlflow.get_tracking_uri()
    run_id, model_uri = None, None
    try:
        mlflow.set_tracking_uri(kept.tracking_uri)  # models are logged by functions that know no other way
        client = mlflow.MlflowClient(kept.tracking_uri)
        run = kept.run or begin_run(client, kept.start, _parent(client, kept.start))
        run_id = run.run_id
        for message in kept.messages:
            if message.kind != "end" or not run.is_joined:
                model_uri = _deliver(client, run_id, message) or model_uri
    except Exception as error:
        _logger.warning("A kept run could not be sent, and stays kept: %s: %s", type(error).__name__, error)
        return SentRun(run_id=run_id, model_uri=model_uri, error=f"{type(error).__name__}: {error}")
    finally:
        mlflow.set_tracking_uri(before)
    return SentRun(run_id=run_id, model_uri=model_uri)


def _deliver(client: MlflowClient, run_id: str, message: Message) -> str | None:
    try:
        return deliver(client, run_id, message)
    except Exception as error:
        if not is_refusal(error):
            raise
        _logger.warning("MLflow does not take %s of the kept run %s: %s", message.kind, run_id, error)
        return None


def _parent(client: MlflowClient, start: RunStart) -> str | None:
    """The run that this one is nested under, as the server knows it; None where it has none."""
    if start.parent_key is None:
        return None
    return find_run(client, [each.experiment_id for each in client.search_experiments()], start.parent_key)


def _read(folder: Path, tracking_uri: str | None) -> KeptRun | None:
    path = folder / RUN_FILE
    if not path.is_file():
        return None  # it is being written, or its writing was broken off
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] > FORMAT:
        raise StoreError(
            f"A run was kept by a newer sparkdl, in format {content['format']}. Install that to send it."
        )
    messages = [
        Message(
            kind=each["kind"],
            content=each["content"],
            folder=None if each["folder"] is None else folder / each["folder"],
        )
        for each in content["messages"]
    ]
    run = content["run"] if tracking_uri in (None, content["tracking_uri"]) else None
    return KeptRun(
        tracking_uri=tracking_uri or content["tracking_uri"],
        start=RunStart(**content["start"]),
        run=None if run is None else BegunRun(**run),
        messages=messages,
    )
