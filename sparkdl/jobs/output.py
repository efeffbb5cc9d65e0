"""The output folder of a job: ``model/``, and ``result.json``, which exists only if the folder is complete.

On filesystems that can rename, the folder appears in one step. On object stores ``result.json`` is written last; the
previous one stays until all new files are in the store. :func:`make_result` makes the content of ``result.json``.
"""

from __future__ import annotations

import json
import platform
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.checks import check_format
from sparkdl.data import Store
from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.errors import ParamError, SavedModelError, SparkdlError, StoreError
from sparkdl.estimators.fit.progress import finite
from sparkdl.estimators.persistence import carry
from sparkdl.foreign_errors import store_error
from sparkdl.versions import package_versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.estimators import TorchModel
    from sparkdl.jobs.job import TrainingJob


FORMAT = 1
"""Number of the format of the folder. Formats with lower numbers remain readable."""

RESULT = "result.json"
MODEL = "model"


class JobOutput:
    """The output folder at a path or URL.

    Args:
        url: path or URL of the folder.

    Attributes:
        url: absolute path or URL of the folder.
    """

    def __init__(self, url: str) -> None:
        self.url = absolute_url(url)
        self._location = open_location(self.url)

    def result(self) -> dict[str, Any] | None:
        """Return the result of the finished job; None if no job has finished there.

        Raises:
            ParamError: if the folder was not written by a job.
            SavedModelError: if a newer version of sparkdl wrote it.
            StoreError: if the folder cannot be read.
        """
        filesystem, path = self._location.filesystem, self._location.path
        try:
            filesystem.invalidate_cache()
            if not filesystem.exists(path):
                return None
            if not filesystem.isdir(path):
                raise self._something_else("is a file")
            if not filesystem.exists(f"{path}/{RESULT}"):
                self._check_unfinished()
                return None
            with filesystem.open(f"{path}/{RESULT}", "rb") as file:
                content = json.loads(file.read())
        except ValueError as error:
            if isinstance(error, ParamError):
                raise
            raise self._something_else(f"has a {RESULT} that is not JSON") from error
        except SparkdlError:
            raise
        except Exception as error:  # the filesystem libraries raise many kinds
            raise store_error(f"The output {self.url} cannot be read", error) from error
        if not isinstance(content, dict) or not content.keys() >= {"format", "job"}:
            raise self._something_else(f"has a {RESULT} without the keys format and job")
        check_format(f"The output {self.url}", content, FORMAT, SavedModelError)
        return content

    def model(self) -> TorchModel:
        """Return the model of this folder.

        Raises:
            SavedModelError: if it cannot be read.
        """
        from sparkdl.estimators.torch_model import TorchModel

        return TorchModel.load(f"{self.url}/{MODEL}")

    def check_writable(self) -> None:
        """Write and remove a small file beside the folder, so that a failure shows before the training, not after it.

        Raises:
            StoreError: if the file cannot be written.
        """
        parent = self.url.rpartition("/")[0] if self._location.can_rename else self.url
        try:
            Store(parent or "/").check_writable()
        except StoreError as error:
            raise StoreError(f"The output {self.url} cannot be written. {error}") from error

    def write(self, model: TorchModel, result: dict[str, Any]) -> None:
        """Write model and result, replacing existing ones once the new ones are complete.

        Raises:
            SavedModelError: if they cannot be written.
        """
        text = json.dumps(finite(result), indent=2, allow_nan=False) + "\n"
        with tempfile.TemporaryDirectory(prefix="sparkdl-save-") as folder:
            made = Path(folder, MODEL)
            made.mkdir()
            model._write_folder(made)
            Path(folder, RESULT).write_text(text, encoding="utf-8")
            carry(Path(folder), self.url, last=RESULT, overwrite=True)

    def _check_unfinished(self) -> None:
        """Check a folder without a result: it may be empty, or on an object store interrupted."""
        filesystem, path = self._location.filesystem, self._location.path
        names = [str(child).rstrip("/").rpartition("/")[2] for child in filesystem.ls(path, detail=False)]
        names = [name for name in names if self._location.can_rename or not name.startswith(".")]
        if names and (self._location.can_rename or names != [MODEL]):
            shown = ", ".join(sorted(names)[:3])
            raise self._something_else(f"holds {shown}{', ...' if len(names) > 3 else ''} and no {RESULT}")

    def _something_else(self, what: str) -> ParamError:
        return ParamError(
            f"The output {self.url} {what}: it was not written by a job. Choose another output, or remove this one."
        )


_LIBRARIES = ("torch", "pyspark", "mlflow", "numpy")


def make_result(
    job: TrainingJob, identity: Mapping[str, Any], model: TorchModel, *, began: datetime
) -> dict[str, Any]:
    """Return the content of ``result.json`` for a finished job.

    Args:
        job: the job.
        identity: identity of the job.
        model: the trained model.
        began: time at which the job began.
    """
    summary = model.summary
    ended = datetime.now(timezone.utc)
    last, of_model = summary.history[-1], summary.model_record
    assert of_model is not None, "a fit has an epoch"
    return {
        "format": FORMAT,
        "job": dict(identity),
        "file": job.file.name,
        "model": MODEL,
        "began": began.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - began).total_seconds(), 3),
        "ranks": len(last.rank_seconds),
        "epochs": len(summary.history),
        "model_epoch": summary.model_epoch,
        "loss": of_model.loss,
        "metrics": dict(of_model.metrics),
        "last": {"epoch": last.epoch, "loss": last.loss, "metrics": dict(last.metrics)},
        "history": [asdict(record) for record in summary.history],
        "run_id": summary.run_id,
        "model_uri": summary.model_uri,
        "versions": {"python": platform.python_version(), **package_versions(_LIBRARIES)},
    }
