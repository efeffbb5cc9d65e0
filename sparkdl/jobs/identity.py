"""The identity of a job. A finished job with the same identity is not repeated.

Two jobs are equal if they differ only in ``spark``, ``output`` and some Params, and have the same code and, as far as
Spark can tell, the same rows. Versions of libraries may differ.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.data.files.filesystems import absolute_url
from sparkdl.data.spark.input_files import state_below
from sparkdl.identity import as_checksum, digest
from sparkdl.tracking import without_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sparkdl.jobs.job import TrainingJob

_WITHOUT_EFFECT = ("output", "code")
_PARAMS_WITHOUT_EFFECT = (
    "cache",
    "checkpointDir",
    "checkpointEverySteps",
    "communicationRetries",
    "compareReplicas",
    "elastic",
    "hangTimeoutSeconds",
    "keepCheckpoints",
    "keepRowsSeconds",
    "logCheckpoints",
    "logFormat",
    "maxRestarts",
    "maxWorkers",
    "minWorkers",
    "monitor",
    "replaceStragglers",
    "showProgress",
    "store",
    "stragglerFactor",
    "stragglerSeconds",
    "threadsPerWorker",
    "trackingTimeoutSeconds",
)
"""Params that say how a job is run. Some change the rounding of sums, or how the rows of a step are divided."""

ROWS = "the rows or settings of spark.sql"
"""Name of the checksum of the rows; its value is None if Spark cannot tell whether rows are the same."""

TEST_ROWS = "the rows of data.test"
"""Name of the checksum of the test rows, likewise."""


def key_of_files(job: TrainingJob) -> str | None:
    """Return a checksum of a job's files and of the settings of its own Spark session, without starting Spark.

    If it is the same as after a training, so are the rows. None for rows that are not named as Parquet files, or if the
    filesystem does not report when files were written.
    """
    sources = [source for source in (job.data, job.test) if source is not None]
    if any(source.kind != "parquet" for source in sources):
        return None
    try:
        states = [state_below(absolute_url(url)) for source in sources for url in source.value]
        home = os.environ.get("SPARK_HOME")
        folder = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
        defaults = Path(folder, "spark-defaults.conf") if folder is not None else None
        settings = defaults.read_text() if defaults is not None and defaults.is_file() else ""
    except Exception:  # Spark alone has the plugin or the credentials for the filesystem
        return None
    if None in states:
        return None
    return as_checksum(digest({"files": states, "settings": settings, "spark": job.spark.config}))


def identity_of(job: TrainingJob, code: Mapping[str, str]) -> dict[str, Any]:
    """Return the identity of a job before its rows are known.

    Args:
        job: the job.
        code: checksums of the code, by name of file or folder.
    """
    said = {key: value for key, value in job.content.items() if key not in _WITHOUT_EFFECT}
    params = said.get("params") or {}
    said["params"] = {name: value for name, value in params.items() if name not in _PARAMS_WITHOUT_EFFECT}
    values = dict(_flat(said))
    if "tracking.uri" in values:
        values["tracking.uri"] = without_credentials(values["tracking.uri"])  # the URI is stored, and shown
    if job.test is not None:
        values[TEST_ROWS] = None
    return {**values, **{f"the code in {name}": content for name, content in code.items()}, ROWS: None}


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{above}{key}.")
        elif inner is not None:
            yield f"{above}{key}", inner
