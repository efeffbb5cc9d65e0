"""A trained module as executors get it, packed once for a model and all its copies. Runs on the *driver*."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from sparkdl.estimators.scoring import ScoringModel
from sparkdl.training.architecture import pack_module

if TYPE_CHECKING:
    from sparkdl.training.architecture import PackedModule
    from sparkdl.training.saved_model import SavedModel


class ScoringModels:
    """Packs a module when it is first asked for, and gives the same object for the same batch size ever after.

    Copies of a model share it, as they share the module, which nobody trains any more: ``transform(df, params)`` works
    on a copy, and executors keep what they loaded by the object's key.
    """

    def __init__(self, saved: SavedModel) -> None:
        self._saved = saved
        self._packed: PackedModule | None = None
        self._models: dict[int, ScoringModel] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ScoringModels, (self._saved,)

    def for_batch_size(self, batch_size: int) -> ScoringModel:
        """Return what an executor needs to predict so many rows at once."""
        with self._lock:
            if self._packed is None:
                self._packed = pack_module(self._saved.module)
            if batch_size not in self._models:
                self._models[batch_size] = ScoringModel(self._packed, self._saved.signature, batch_size)
            return self._models[batch_size]
