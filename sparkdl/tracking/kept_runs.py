"""Folders with the unsent messages of a run, which can be sent later.

A folder contains the folders of models and checkpoints, and ``run.json``, which is written last: a folder without it is
incomplete, and is never read. The folders are in the folder ``unsent-runs`` of a Store.
"""

from __future__ import annotations

import json
import logging
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.checks import check_format
from sparkdl.data.files.filesystems import open_location
from sparkdl.errors import StoreError
from sparkdl.foreign_errors import store_errors
from sparkdl.tracking.sender import Logged, Message, MessageRefusedError, deliver
from sparkdl.tracking.start import (
    BegunRun,
    RunStart,
    begin_run,
    find_run,
    reporting_to,
    with_known_credentials,
    without_credentials,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlflow import MlflowClient

    from sparkdl.data import Store

FORMAT = 1
"""Number of the format of ``run.json``. Formats with lower numbers remain readable."""

RUN_FILE = "run.json"
FOLDER = "unsent-runs"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """The unsent messages of a run.

    Attributes:
        tracking_uri: URI of the MLflow server, without user and password.
        start: description of the run.
        run: the run on the server; None if it was not opened.
        messages: unsent messages, in order.
        model_uri: URI of the logged model; None if the server has not accepted one.
    """

    tracking_uri: str
    start: RunStart
    run: BegunRun | None
    messages: Sequence[Message]
    model_uri: str | None = None


def keep_run(kept: KeptRun, store: Store) -> str:
    """Store the unsent messages of a run, and return the URL of the folder.

    Args:
        kept: the run and its messages.
        store: Store in which to keep them.

    Raises:
        StoreError: if the folder cannot be written.
    """
    folders, messages = {}, []
    for number, message in enumerate(kept.messages):
        folder = None
        if message.folder is not None:
            folder = f"{number:04}"
            folders[folder] = message.folder
        messages.append({"kind": message.kind, "content": message.content, "folder": folder})
    content = {
        "format": FORMAT,
        "tracking_uri": kept.tracking_uri,
        "start": asdict(kept.start),
        "run": None if kept.run is None else asdict(kept.run),
        "messages": messages,
        "model_uri": kept.model_uri,
    }
    url = f"{store.url}/{FOLDER}/{kept.start.start_time:015}-{kept.start.key[:12]}"
    try:
        there = open_location(url)
        there.make_folder()
        for name, local in folders.items():
            open_location(f"{url}/{name}").put_folder(local)
        there.write_whole(RUN_FILE, json.dumps(content).encode(), writer=uuid.uuid4().hex[:8])
    except Exception as error:
        raise store.cannot_be_written(error) from error
    return url


@dataclass(frozen=True, kw_only=True)
class SentRun:
    """The result of sending a kept run.

    Attributes:
        run_id: MLflow's id of the run; None if the run could not be read or opened.
        model_uri: URI of the logged model; None if there is none.
        error: why the run could not be sent and is still kept; None if it was sent.
    """

    run_id: str | None
    model_uri: str | None = None
    error: str | None = None


def send_kept_runs(store: Store, tracking_uri: str | None = None) -> list[SentRun]:
    """Send all kept runs of a Store, the oldest first; remove those that are sent, and keep the others.

    Folders without ``run.json`` are left alone: a driver is writing them, or died while it did.

    Args:
        store: Store with the kept runs.
        tracking_uri: URI of the server to send to; None for the servers of the fits.

    Raises:
        StoreError: if the Store cannot be read or written.
    """
    sent: list[SentRun] = []
    there = open_location(f"{store.url}/{FOLDER}")
    with store_errors(f"{there.path} cannot be read or written"):
        there.filesystem.invalidate_cache()
        paths = there.filesystem.ls(there.path, detail=False) if there.filesystem.exists(there.path) else []
        for name in sorted(Path(path).name for path in paths):
            if not there.filesystem.exists(f"{there.path}/{name}/{RUN_FILE}"):
                _logger.info(
                    "%s has no %s: it is being written, or its driver died meanwhile.", name, RUN_FILE
                )
                continue
            with tempfile.TemporaryDirectory(prefix="sparkdl-kept-") as folder:
                open_location(f"{store.url}/{FOLDER}/{name}").fetch_folder(Path(folder))
                sent.append(_send_folder(name, Path(folder), tracking_uri))
            if sent[-1].error is None:
                there.filesystem.rm(f"{there.path}/{name}", recursive=True)
        there.filesystem.invalidate_cache()
        if there.filesystem.exists(there.path) and not there.filesystem.ls(there.path, detail=False):
            there.filesystem.rm(there.path, recursive=True)
    return sent


def _send_folder(name: str, folder: Path, tracking_uri: str | None) -> SentRun:
    try:
        kept = _read(folder, tracking_uri)
    except (StoreError, ValueError, KeyError, TypeError) as error:
        said = f"{name} cannot be read: {type(error).__name__}: {error}"
        _logger.warning("A kept run was not sent: %s", said)
        return SentRun(run_id=None, error=said)
    return _send(kept)


def _send(kept: KeptRun) -> SentRun:
    import mlflow

    uri = with_known_credentials(kept.tracking_uri)
    run_id, model_uri, refusal = None, kept.model_uri, None
    try:
        client = mlflow.MlflowClient(uri)
        with reporting_to(uri):  # the functions that find MLflow's active experiment take no client
            run = kept.run or begin_run(client, kept.start, _parent(client, kept.start))
        run_id = run.run_id
        logged: Logged = {}
        for message in kept.messages:
            if message.kind == "registration" and model_uri is None:
                continue  # the model was refused
            try:
                model_uri = deliver(client, run, message, model_uri, logged) or model_uri
            except MessageRefusedError as error:
                said = without_credentials(str(error.__cause__))
                _logger.warning("MLflow refuses %s of the kept run %s: %s", message.kind, run_id, said)
                if error.may_be_granted:
                    refusal = f"{type(error.__cause__).__name__}: {said}"
    except Exception as error:
        said = f"{type(error).__name__}: {without_credentials(str(error))}"
        _logger.warning("A kept run could not be sent, and is still kept: %s", said)
        return SentRun(run_id=run_id, model_uri=model_uri, error=said)
    return SentRun(run_id=run_id, model_uri=model_uri, error=refusal)


def _parent(client: MlflowClient, start: RunStart) -> str | None:
    """Return the id of the run under which this run is nested; None if there is no such run on the server."""
    if start.parent_key is None:
        return None
    experiments: list[str] = []
    token = None
    while True:
        page = client.search_experiments(page_token=token)
        experiments += [experiment.experiment_id for experiment in page]
        token = page.token
        if not token:
            parent = find_run(client, experiments, start.parent_key)
            return None if parent is None else str(parent.info.run_id)


def _read(folder: Path, tracking_uri: str | None) -> KeptRun:
    content: dict[str, Any] = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    check_format(RUN_FILE, content, FORMAT, StoreError)
    messages = [
        Message(
            kind=message["kind"],
            content=message["content"],
            folder=None if message["folder"] is None else folder / message["folder"],
        )
        for message in content["messages"]
    ]
    meant_for = without_credentials(content["tracking_uri"])
    is_same = tracking_uri is None or without_credentials(tracking_uri) == meant_for
    run = content["run"] if is_same else None
    return KeptRun(
        tracking_uri=tracking_uri or content["tracking_uri"],
        start=RunStart(**content["start"]),
        run=None if run is None else BegunRun(**run),
        messages=messages,
        model_uri=content["model_uri"],
    )
