"""Saves and loads the estimator and its model, on classic Spark and Spark Connect.

Layout of the folder; Spark's own pipelines read and write the same metadata::

    metadata/part-00000   one line of JSON: class, uid, Params (as DefaultParamsWriter of pyspark.ml)
    metadata/_SUCCESS
    module/               the module, see sparkdl.model.saved_model
    functions.pkl         Params that JSON cannot hold, such as loss and optimizer, by cloudpickle

Paths and URLs are those of :func:`sparkdl.data.files.filesystems.open_location`. The driver reads and writes the
folder, and Spark the metadata of a pipeline around it: a pipeline has to be saved where both can reach it. On Spark
Connect that excludes local paths, unless the server runs on the same machine. Loading runs pickled code: load only
files that you trust.
"""

from __future__ import annotations

import json
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import cloudpickle
from pyspark import __version__ as pyspark_version
from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWriter

from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.errors import ParamError, SavedModelError, SerializationError, SparkdlError
from sparkdl.estimators.summary import TrainingSummary
from sparkdl.foreign_errors import explain_failure, reading_from
from sparkdl.model.saved_model import load_model, load_module, save_model, save_module
from sparkdl.training.history import EpochRecord

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from pyspark.ml.param import Params

    from sparkdl.estimators.torch_estimator import TorchEstimator
    from sparkdl.estimators.torch_model import TorchModel

_OVERWRITE = "Use write().overwrite().save(path) to replace it."
_METADATA = "metadata/part-00000"
_MODULE = "module"
_FUNCTIONS = "functions.pkl"

M = TypeVar("M", bound="TorchModel")
E = TypeVar("E", bound=MLReadable[Any])


class FolderWriter(MLWriter, ABC):
    """Builds a folder on the driver's disk and copies it to its destination.

    Attributes:
        last: file of the folder without which readers refuse it.
    """

    last = _METADATA

    def save(self, path: str) -> None:
        """Write to a path or URL; an existing one is replaced only after ``overwrite()``.

        Raises:
            SavedModelError: if the path exists or cannot be written; existing content is kept.
            SerializationError: if a part cannot be pickled.
        """
        self.saveImpl(path)

    def saveImpl(self, path: str) -> None:
        """Write to a path or URL."""
        with tempfile.TemporaryDirectory(prefix="sparkdl-save-") as folder:
            self.build(Path(folder))
            carry(Path(folder), path, last=self.last, overwrite=self.shouldOverwrite)

    @abstractmethod
    def build(self, folder: Path) -> None:
        """Write everything into a new local folder."""


class TorchModelWriter(FolderWriter):
    """Writer of a :class:`TorchModel`."""

    def __init__(self, model: TorchModel) -> None:
        super().__init__()
        self._model = model

    def build(self, folder: Path) -> None:
        """Write metadata and module."""
        summary = self._model.summary
        extra = {
            "history": [asdict(record) for record in summary.history],
            "modelEpoch": summary.model_epoch,
            "runId": summary.run_id,
            "modelUri": summary.model_uri,
        }
        _write_params(self._model, folder, extra)
        save_model(self._model.saved, folder / _MODULE)


class ParamsWriter(FolderWriter):
    """Writer of an estimator that consists only of its Params."""

    def __init__(self, estimator: Params) -> None:
        super().__init__()
        self._estimator = estimator

    def build(self, folder: Path) -> None:
        """Write the metadata, and the functions among the Params."""
        _write_params(self._estimator, folder, {})


class TorchEstimatorWriter(FolderWriter):
    """Writer of a :class:`TorchEstimator`."""

    def __init__(self, estimator: TorchEstimator) -> None:
        super().__init__()
        self._estimator = estimator

    def build(self, folder: Path) -> None:
        """Write metadata, the module to train, and the functions."""
        estimator = self._estimator
        _write_params(estimator, folder, {})
        if estimator.isSet(estimator.model):
            save_module(estimator.getModel(), folder / _MODULE)


class TorchModelReader(MLReader[M]):
    """Reader of a :class:`TorchModel` or a class derived from it."""

    def __init__(self, made: type[M]) -> None:
        super().__init__()
        self._class = made

    def load(self, path: str) -> M:
        """Read from a path or URL.

        Raises:
            SavedModelError: if the path holds no such model, or a model that is damaged or of a newer version.
        """
        return cast("M", _with_local_folder(path, self._load))

    def _load(self, folder: Path) -> M:
        metadata = _read_metadata(folder, self._class)
        history = tuple(EpochRecord.from_dict(record) for record in metadata.get("history", ()))
        summary = TrainingSummary(
            history=history,
            model_epoch=metadata.get("modelEpoch"),
            run_id=metadata.get("runId"),
            model_uri=metadata.get("modelUri"),
        )
        model = self._class(load_model(folder / _MODULE), summary)
        _restore(model, metadata, folder)
        return model


class TorchEstimatorReader(MLReader[E]):
    """Reader of an estimator, made by its class without arguments."""

    def __init__(self, made: type[E]) -> None:
        super().__init__()
        self._class = made

    def load(self, path: str) -> E:
        """Read from a path or URL.

        Raises:
            SavedModelError: if the path holds no such estimator, or one that is damaged or of a newer version.
        """
        return cast("E", _with_local_folder(path, self._load))

    def _load(self, folder: Path) -> E:
        metadata = _read_metadata(folder, cast("type[Params]", self._class))
        estimator: Any = self._class()
        _restore(estimator, metadata, folder)
        if (folder / _MODULE).exists():
            estimator.setModel(load_module(folder / _MODULE)[0])
        return cast("E", estimator)


def _write_params(instance: Params, folder: Path, extra: dict[str, Any]) -> None:
    """Write the metadata with the Params that JSON preserves, and pickle the other Params, except the module."""
    params = {param.name: value for param, value in instance._paramMap.items() if param.name != "model"}
    defaults = {param.name: value for param, value in instance._defaultParamMap.items()}
    others = {name: value for name, value in params.items() if not _is_json(value)}
    metadata = {
        "class": _name_of(type(instance)),
        "timestamp": round(time.time() * 1000),
        "sparkVersion": pyspark_version,
        "uid": instance.uid,
        "paramMap": {name: value for name, value in params.items() if name not in others},
        "pickledParams": list(others),
        "defaultParamMap": {name: value for name, value in defaults.items() if _is_json(value)},
        **extra,
    }
    (folder / "metadata").mkdir()
    (folder / _METADATA).write_text(json.dumps(metadata) + "\n", encoding="utf-8")
    (folder / "metadata" / "_SUCCESS").touch()
    if not others:
        return
    try:
        (folder / _FUNCTIONS).write_bytes(cloudpickle.dumps(others))
    except Exception as error:
        raise SerializationError(
            f"Params {', '.join(others)} cannot be saved: {type(error).__name__}: {error}"
        ) from error


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _name_of(made: type) -> str:
    return f"{made.__module__}.{made.__name__}"


def _read_metadata(folder: Path, expected: type[Params]) -> dict[str, Any]:
    name = _name_of(expected)
    try:
        # Spark gives the file a longer name.
        file = next(iter(sorted(folder.glob(f"{_METADATA}*"))), folder / _METADATA)
        metadata = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
        class_name = str(metadata["class"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SavedModelError(
            f"There is no readable {expected.__name__}: {type(error).__name__}: {error}"
        ) from error
    if class_name != name:
        module, _, kind = class_name.replace("org.apache.spark.ml.", "pyspark.ml.").rpartition(".")
        inside = (
            f" The {expected.__name__} may be one of its stages, or its bestModel."
            if module.startswith("pyspark.")
            else ""
        )
        raise SavedModelError(
            f"The path holds a {class_name}, not a {name}. Load it with that class: from {module} import {kind}; "
            f"{kind}.load(path).{inside}"
        )
    return metadata


def _restore(instance: Any, metadata: dict[str, Any], folder: Path) -> None:
    instance._resetUid(metadata["uid"])
    try:
        DefaultParamsReader.getAndSetParams(instance, metadata)
        if metadata.get("pickledParams", (folder / _FUNCTIONS).exists()):
            instance.setParams(**_read_functions(folder))
    except AttributeError as error:
        raise SavedModelError(
            f"It was written with a Param that this sparkdl does not know: {error}. Install a newer sparkdl."
        ) from error
    except ParamError as error:
        raise SavedModelError(
            f"It was written with a value that this sparkdl does not take. {error}"
        ) from error


def _read_functions(folder: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", cloudpickle.loads((folder / _FUNCTIONS).read_bytes()))
    except Exception as error:
        raise SavedModelError(
            f"Loss, optimizer and the like cannot be read from {_FUNCTIONS}: {type(error).__name__}: {error}"
        ) from error


def carry(
    folder: Path, path: str | os.PathLike[str], *, last: str, overwrite: bool, remedy: str = _OVERWRITE
) -> None:
    """Copy a local folder to a path or URL, as :meth:`sparkdl.data.files.filesystems.Location.put_folder` does.

    Args:
        folder: local folder.
        path: path or URL of the destination.
        last: file of the folder without which readers refuse it.
        overwrite: whether to replace existing content.
        remedy: what to do about existing content, for the error message.

    Raises:
        SavedModelError: if the destination exists or cannot be written; existing content is kept.
    """
    url = absolute_url(path)
    try:
        there = open_location(url)
        if there.filesystem.exists(there.path) and not overwrite:
            raise SavedModelError(f"{url} exists already. {remedy}")
        there.put_folder(folder, last=last)
    except SparkdlError:
        raise
    except Exception as error:
        raise SavedModelError(f"{url} cannot be written: {explain_failure(error)}") from error


def _with_local_folder(path: str, load: Callable[[Path], Any]) -> Any:
    """Call ``load`` with the folder at a path or URL, which is copied to the driver's disk if it is not local."""
    url = absolute_url(path)
    with tempfile.TemporaryDirectory(prefix="sparkdl-load-") as folder:
        with reading_from(url):
            there = open_location(url)
            if not there.filesystem.exists(there.path):
                raise SavedModelError(f"{url} does not exist.")
            if not there.is_local:
                there.fetch_folder(Path(folder))
        try:
            return load(Path(there.path if there.is_local else folder))
        except SavedModelError as error:
            raise SavedModelError(f"{url} cannot be loaded. {error}") from error
