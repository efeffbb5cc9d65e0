"""The identity of a job, by which a finished job is recognized and not repeated.

Two jobs are equal if they differ only in ``spark``, ``output`` and some Params, and have the same code and, as far as
Spark can tell, the same rows. Versions of libraries may differ.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.tracking import without_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sparkdl.jobs.job import TrainingJob

_WITHOUT_EFFECT = ("spark", "output", "code")
_PARAMS_WITHOUT_EFFECT = (
    "cache",
    "checkpointDir",
    "checkpointEverySteps",
    "compareReplicas",
    "hangTimeoutSeconds",
    "keepCheckpoints",
    "keepRowsSeconds",
    "maxRestarts",
    "minWorkers",
    "showProgress",
    "store",
    "threadsPerWorker",
    "trackingTimeoutSeconds",
)
"""Params that change neither the model nor its metrics."""

_LONGEST = 5
_ABSENT = "not there"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of a job.

    Attributes:
        said: values of the job file, by their keys joined by dots.
        code: hashes of the code, by name of file or folder.
        rows: key of the rows; None if Spark cannot tell whether rows are the same.
    """

    said: Mapping[str, Any]
    code: Mapping[str, str]
    rows: str | None = None

    @property
    def digest(self) -> str:
        """Hash of the whole identity."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """Describe the differences to an earlier identity, given as a dict; unknown rows count as equal."""
        found = [
            f"{key} was {was} and is {is_}" for key, was, is_ in _changes(before.get("said", {}), self.said)
        ]
        found += [
            f"the code in {name} has changed" for name, _, _ in _changes(before.get("code", {}), self.code)
        ]
        known = before.get("rows")
        if known is not None and self.rows is not None and known != self.rows:
            found.append("the rows or settings of spark.sql have changed")
        return found if len(found) <= _LONGEST else [*found[:_LONGEST], f"{len(found) - _LONGEST} more"]


def identity_of(job: TrainingJob, code: Mapping[str, str]) -> Identity:
    """Return the identity of a job before its rows are known."""
    said = {key: value for key, value in job.content.items() if key not in _WITHOUT_EFFECT}
    without_effect = {f"params.{name}" for name in _PARAMS_WITHOUT_EFFECT}
    values = {key: value for key, value in _flat(said) if key not in without_effect}
    if "tracking.uri" in values:
        values["tracking.uri"] = without_credentials(values["tracking.uri"])  # the URI is stored, and shown
    return Identity(said=values, code=dict(code))


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{above}{key}.")
        elif inner is not None:
            yield f"{above}{key}", inner


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key in sorted({*before, *now}):
        # Compared as JSON texts, in which 0, 0.0 and false differ.
        was, is_ = _shown(before, key), _shown(now, key)
        if was != is_:
            yield key, was, is_


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else _ABSENT
