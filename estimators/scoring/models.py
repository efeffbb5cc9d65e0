"""Packs a trained module for the executors, once for a model and all its copies.

Large weights go to the executors as a file, separately from the plans that use them. On classic Spark a function above
1 MiB travels as a broadcast, which is pickled as a whole and then held as a whole in the memory of the driver's JVM;
a file is streamed from disk instead. A Connect client has no broadcasts: the function would be part of every plan; a
plan above 128 MiB is refused, and a plan of 100 MiB exhausted a server with 1 GiB of memory. An artifact goes to the
server once per session and in chunks, and from there to the executors. Such files cannot be removed before the
session ends, so small weights are not sent this way.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sparkdl.estimators.scoring.udf import ScoringModel
from sparkdl.model.architecture import split_module
from sparkdl.model.weights_file import weights_as_bytes, write_weights
from sparkdl.spark.session import is_connect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession
    from torch import Tensor

    from sparkdl.model.saved_model import SavedModel


MAX_BYTES_IN_PLAN = 1 << 20
MAX_BYTES_IN_BROADCAST = 64 << 20

_sent: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
_until_exit = ExitStack()
"""Holds the folders from which a classic driver serves files to its executors, including later ones."""
atexit.register(_until_exit.close)


def send_weights(tensors: Mapping[str, Tensor], name: str, spark: SparkSession) -> None:
    """Send tensors to a session's executors as a Spark file; a name that was already sent is not sent again.

    Args:
        tensors: tensors of a module, with their current values.
        name: name of the file, which must be unique to these tensors.
        spark: session whose executors get the file.
    """
    receiver: Any = spark if is_connect(spark) else spark.sparkContext
    names = _sent.setdefault(receiver, set())
    if name in names:
        return
    folder = Path(tempfile.mkdtemp(prefix="sparkdl-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with (folder / name).open("wb") as file:
            write_weights(tensors, file)
        if is_connect(spark):
            spark.addArtifacts(str(folder / name), file=True)
        else:
            spark.sparkContext.addFile(str(folder / name))
            _until_exit.push(stack.pop_all())
    names.add(name)


class ScoringModels:
    """Packs a module when it is first needed, and returns the same object for the same batch size from then on.

    Copies of a model share this object, as they share the trained module: ``transform(df, params)`` works on a copy,
    and executors cache loaded modules by the key of the :class:`ScoringModel`. Large weights are not packed, but sent
    to the executors as a file.
    """

    def __init__(self, saved: SavedModel) -> None:
        self._saved = saved
        self._split: tuple[bytes, dict[str, Tensor]] | None = None
        self._weights: bytes | None = None
        self._models: dict[tuple[int, bool, int | None, bool], ScoringModel] = {}
        self._file = f"sparkdl-{uuid.uuid4().hex}.safetensors"
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ScoringModels, (self._saved,)

    def for_session(
        self,
        spark: SparkSession,
        batch_size: int,
        num_threads: int | None = None,
        *,
        shares_gpu: bool = False,
    ) -> ScoringModel:
        """Return what an executor of a session needs to predict batches of ``batch_size`` rows, besides Spark files.

        ``num_threads`` is the number of threads of each task; None for the cores of a task. ``shares_gpu`` says whether
        several tasks use a GPU at once.
        """
        with self._lock:
            if self._split is None:
                self._split = split_module(self._saved.module)
            structure, tensors = self._split
            most = MAX_BYTES_IN_PLAN if is_connect(spark) else MAX_BYTES_IN_BROADCAST
            is_file = sum(tensor.nbytes for tensor in tensors.values()) > most
            if is_file:
                send_weights(tensors, self._file, spark)
            key = batch_size, is_file, num_threads, shares_gpu
            if key not in self._models:
                if not is_file and self._weights is None:
                    self._weights = weights_as_bytes(tensors)
                self._models[key] = ScoringModel(
                    structure,
                    self._file if is_file or self._weights is None else self._weights,
                    self._saved.signature,
                    batch_size,
                    num_threads=num_threads,
                    shares_gpu=shares_gpu,
                    module_key=self._file,
                )
            return self._models[key]
