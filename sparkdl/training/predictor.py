"""Applies a module to columns of NumPy values. Runs anywhere; needs torch and NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdl.errors import DataError
from sparkdl.training.columns import dtype_named, to_features

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkdl.training.losses import PredictionKind
    from sparkdl.training.saved_model import SavedModel

DEFAULT_BATCH_SIZE = 1024


class Predictor:
    """A module that answers in predictions.

    Args:
        model: the module and its signature; the module is moved to ``device`` and put in ``eval()`` mode.
        batch_size: rows per forward pass.
        device: where the module runs.
    """

    def __init__(
        self, model: SavedModel, *, batch_size: int = DEFAULT_BATCH_SIZE, device: torch.device | str = "cpu"
    ) -> None:
        self.signature = model.signature
        self._batch_size = batch_size
        self._device = torch.device(device)
        self._module = model.module.to(self._device).eval()
        self._dtype = dtype_named(model.signature.features_dtype)

    def predict(self, columns: Mapping[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.float64]:
        """Return one prediction per row, ``(rows, *prediction_shape)`` as float64.

        Args:
            columns: holds the feature column, ``(rows, *features_shape)``.

        Raises:
            DataError: if the column is missing or its rows have another shape than the model was trained on.
        """
        features = self._features(columns)
        shape = self.signature.prediction_shape
        predictions = np.empty((len(features), *shape), dtype=np.float64)
        with torch.inference_mode():
            for start in range(0, len(features), self._batch_size):
                stop = start + self._batch_size
                outputs = self._module(to_features(features[start:stop], self._dtype, self._device))
                predicted = decide(outputs, self.signature.prediction_kind).to("cpu", torch.float64).numpy()
                predictions[start:stop] = predicted.reshape(-1, *shape)
        return predictions

    def _features(self, columns: Mapping[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
        name, shape = self.signature.features, self.signature.features_shape
        if name not in columns:
            raise DataError(f"There is no column {name!r}. The columns are: {', '.join(columns)}.")
        features = columns[name]
        if features.shape[1:] != shape:
            raise DataError(
                f"Column {name!r} has rows of shape {features.shape[1:]}, and the model was trained on "
                f"{shape}."
            )
        return features


def decide(outputs: Tensor, kind: PredictionKind) -> Tensor:
    """Turn a module's outputs into predictions.

    ``"class"``: index of the largest of ``(N, classes, ...)``; ``"binary_logit"`` and
    ``"binary_probability"``: 1 above 0 or 0.5, else 0; ``"value"``: the output itself.
    """
    if kind == "class":
        return outputs.argmax(dim=1)
    if kind == "binary_logit":
        return outputs > 0
    if kind == "binary_probability":
        return outputs > 0.5
    return outputs
