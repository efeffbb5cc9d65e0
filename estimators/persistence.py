"""Saves and loads the estimator and its model, on classic Spark and Spark Connect.

Layout of the folder; Spark's own pipelines read and write the same metadata::

    metadata/part-00000   one line of JSON: format, class, uid, Params (as DefaultParamsWriter of pyspark.ml)
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
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import cloudpickle
from pyspark import __version__ as pyspark_version
from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWritable, MLWriter

from sparkdl.checks import check_format
from sparkdl.data.files.filesystems import absolute_url, open_location
from sparkdl.errors import ParamError, SavedModelError, SerializationError, SparkdlError
from sparkdl.foreign_errors import errors_as, explain_failure, reading_from
from sparkdl.model.saved_model import SAVE_AGAIN, load_module, save_module

if TYPE_CHECKING:
    import os

    from pyspark.ml.param import Params

_FORMAT = 1
"""Number of the format of the folder. Formats with lower numbers remain readable."""

_OVERWRITE = "Use write().overwrite().save(path) to replace it."
_METADATA = "metadata/part-00000"
MODULE = "module"
_FUNCTIONS = "functions.pkl"

S = TypeVar("S", bound=MLReadable[Any])


class SavedInFolder(MLReadable[S], MLWritable):
    """An object with Params that Spark ML saves as such a folder, and loads from one."""

    def write(self) -> MLWriter:
        """Return a writer: ``write().overwrite().save(path)``."""
        return FolderWriter(self)

    @classmethod
    def read(cls) -> MLReader[S]:
        """Return a reader; :meth:`load` is a shortcut for ``read().load(path)``."""
        return FolderReader(cls)

    def _write_folder(self, folder: Path) -> None:
        """Write the Params, and the module of an estimator that has one, into a new local folder."""
        estimator: Any = self
        write_params(estimator, folder, {})
        if estimator.hasParam("model") and estimator.isSet("model"):
            save_module(estimator.getModel(), folder / MODULE)

    @classmethod
    def _read_folder(cls, folder: Path) -> S:
        """Return the estimator in a local folder; its class makes it without arguments."""
        metadata = read_metadata(folder, cls)
        estimator: Any = cls()
        restore(estimator, metadata, folder)
        if (folder / MODULE).exists():
            estimator.setModel(load_module(folder / MODULE)[0])
        return cast("S", estimator)


class FolderWriter(MLWriter):
    """Builds a folder on the driver's disk and copies it to its destination."""

    def __init__(self, instance: SavedInFolder[Any]) -> None:
        super().__init__()
        self._instance = instance

    def save(self, path: str) -> None:
        """Write to a path or URL; an existing one is replaced only after ``overwrite()``.

        Raises:
            SavedModelError: if the path exists or cannot be written; existing content is kept.
            SerializationError: if a part cannot be pickled.
        """
        with tempfile.TemporaryDirectory(prefix="sparkdl-save-") as folder:
            self._instance._write_folder(Path(folder))
            carry(Path(folder), path, last=_METADATA, overwrite=self.shouldOverwrite)


class FolderReader(MLReader[S]):
    """Reads a folder, which is copied to the driver's disk if it is not local."""

    def __init__(self, made: type[SavedInFolder[S]]) -> None:
        super().__init__()
        self._class = made

    def load(self, path: str) -> S:
        """Read from a path or URL an object of this class, or of one that extends it.

        Raises:
            SavedModelError: if the path holds no such object, or one that is damaged or of a newer version.
        """
        url = absolute_url(path)
        with tempfile.TemporaryDirectory(prefix="sparkdl-load-") as folder:
            with reading_from(url):
                there = open_location(url)
                if not there.filesystem.exists(there.path):
                    raise SavedModelError(f"{url} does not exist.")
                if not there.is_local:
                    there.fetch_folder(Path(folder))
            local = Path(there.path if there.is_local else folder)
            try:
                with errors_as(SavedModelError, "Its content cannot be read", SAVE_AGAIN):
                    return _class_in(local, self._class)._read_folder(local)
            except SavedModelError as error:
                raise SavedModelError(f"{url} cannot be loaded. {error}") from error


def write_params(instance: Params, folder: Path, extra: dict[str, Any]) -> None:
    """Write the metadata with the Params that JSON preserves, and pickle the other Params, except the module.

    Raises:
        SerializationError: if a Param cannot be pickled.
    """
    params = {param.name: value for param, value in instance._paramMap.items() if param.name != "model"}
    defaults = {param.name: value for param, value in instance._defaultParamMap.items()}
    others = {name: value for name, value in params.items() if not _is_json(value)}
    metadata = {
        "format": _FORMAT,
        "class": f"{type(instance).__module__}.{type(instance).__name__}",
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
    with errors_as(SerializationError, f"Params {', '.join(others)} cannot be saved"):
        (folder / _FUNCTIONS).write_bytes(cloudpickle.dumps(others))


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _class_in(folder: Path, expected: type[S]) -> type[S]:
    """Return the class of the object in a folder if it extends the expected one, and otherwise the expected one."""
    module, _, name = _any_metadata(folder, expected)["class"].rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except Exception:  # whatever the module raises; read_metadata names the class
        return expected
    return kind if isinstance(kind, type) and issubclass(kind, expected) else expected


def _any_metadata(folder: Path, expected: type) -> dict[str, Any]:
    try:
        # Spark gives the file a longer name.
        file = next(iter(sorted(folder.glob(f"{_METADATA}*"))), folder / _METADATA)
        metadata = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
        metadata["class"] = str(metadata["class"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SavedModelError(
            f"The metadata of a {expected.__name__} in {folder} cannot be read: {type(error).__name__}: {error}"
        ) from error
    return metadata


def read_metadata(folder: Path, expected: type) -> dict[str, Any]:
    """Return the metadata of an object that :func:`write_params` wrote.

    Raises:
        SavedModelError: if there is no readable metadata, or it is of another class or a newer format.
    """
    metadata = _any_metadata(folder, expected)
    name, class_name = f"{expected.__module__}.{expected.__name__}", metadata["class"]
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
    with errors_as(SavedModelError, f"The metadata of a {expected.__name__} in {folder} cannot be read"):
        check_format(f"The {expected.__name__}", metadata, _FORMAT, SavedModelError)
    return metadata


def restore(instance: Any, metadata: dict[str, Any], folder: Path) -> None:
    """Set the uid and the Params of an object from its metadata and the functions beside them.

    Raises:
        SavedModelError: if a Param is not known or not accepted, or the functions cannot be read.
    """
    instance._resetUid(metadata["uid"])
    try:
        DefaultParamsReader.getAndSetParams(instance, metadata)
        if metadata.get("pickledParams", (folder / _FUNCTIONS).exists()):
            with errors_as(SavedModelError, f"Loss, optimizer and the like cannot be read from {_FUNCTIONS}"):
                functions = cloudpickle.loads((folder / _FUNCTIONS).read_bytes())
            instance.setParams(**functions)
    except AttributeError as error:
        raise SavedModelError(
            f"It was written with a Param that this sparkdl does not know: {error}. Install a newer sparkdl."
        ) from error
    except ParamError as error:
        raise SavedModelError(
            f"It was written with a value that this sparkdl does not take. {error}"
        ) from error


def carry(
    folder: Path, path: str | os.PathLike[str], *, last: str, overwrite: bool, remedy: str = _OVERWRITE
) -> None:
    """Copy a local folder to a path or URL, as :meth:`sparkdl.data.files.filesystems.Location.put_folder` does.

    Args:
        folder: local folder.
        path: path or URL of the destination.
        last: file that is copied last; without it, readers refuse the folder.
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
