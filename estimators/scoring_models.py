"""A trained module as executors get it, packed once for a model and all its copies. Runs on the *driver*."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any

from sparkdl.estimators.scoring import ScoringModel
from sparkdl.estimators.sent_weights import send_weights, travels_as_file
from sparkdl.model.architecture import PackedModule, pack_tensors, split_module
from sparkdl.model.weights_file import num_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from torch import Tensor

    from sparkdl.model.saved_model import SavedModel


class ScoringModels:
    """Packs a module when it is first asked for, and gives the same object for the same batch size ever after.

    Copies of a model share it, as they share the module, which nobody trains any more: ``transform(df, params)`` works
    on a copy, and executors keep what they loaded by the object's key. Large weights are not packed: they go to the
    executors from where they lie.
    """

    def __init__(self, saved: SavedModel) -> None:
        self._saved = saved
        self._split: tuple[bytes, dict[str, Tensor]] | None = None
        self._packed: dict[bool, PackedModule] = {}
        self._models: dict[tuple[int, bool], ScoringModel] = {}
        self._file = f"sparkdl-{uuid.uuid4().hex}.safetensors"
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ScoringModels, (self._saved,)

    def for_session(self, spark: SparkSession, batch_size: int) -> ScoringModel:
        """Return what an executor of a session needs to predict so many rows at once, besides the files it has."""
        with self._lock:
            if self._split is None:
                self._split = split_module(self._saved.module)
            structure, tensors = self._split
            is_file = travels_as_file(num_bytes(tensors), spark)
            if is_file:
                send_weights(tensors, self._file, spark)
            key = batch_size, is_file
            if key not in self._models:
                if is_file not in self._packed:
                    self._packed[is_file] = (
                        PackedModule(structure, b"") if is_file else pack_tensors(structure, tensors)
                    )
                self._models[key] = ScoringModel(
                    self._packed[is_file],
                    self._saved.signature,
                    batch_size,
                    weights_file=self._file if is_file else None,
                )
            return self._models[key]
