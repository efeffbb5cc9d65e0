"""Applies a module to columns of NumPy values. Runs anywhere; needs torch and NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdl.training.heads import output_of_each

if TYPE_CHECKING:
    from sparkdl.training.losses import PredictionKind
    from sparkdl.training.model_inputs import Arrays
    from sparkdl.training.saved_model import SavedModel
    from sparkdl.training.signature import ModelOutput

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

    def predict(self, columns: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Return by the name of each output one prediction per row.

        They are float64 of shape ``(rows, *output.shape)``, or what the label column calls the classes.

        Args:
            columns: holds the feature columns, ``(rows, *column.shape)``.

        Raises:
            DataError: if a column is missing, its rows have another shape than the model was trained on, or it holds
                what cannot be made numbers.
        """
        inputs, outputs = self.signature.inputs, self.signature.outputs
        num_rows = len(next(iter(columns.values())))
        predictions = {output.name: np.empty((num_rows, *output.shape), np.float64) for output in outputs}
        with torch.inference_mode():
            for start in range(0, num_rows, self._batch_size):
                rows = slice(start, start + self._batch_size)
                arrays = inputs.prepared({name: values[rows] for name, values in columns.items()})
                returned = inputs.apply(self._module, arrays, self._device)
                found = output_of_each(returned, list(predictions))
                for output in outputs:
                    decided = decide(found[output.name], output.kind).to("cpu", torch.float64).numpy()
                    predictions[output.name][rows] = decided.reshape(-1, *output.shape)
        return {output.name: _called(predictions[output.name], output) for output in outputs}


def _called(predictions: npt.NDArray[np.float64], output: ModelOutput) -> npt.NDArray[Any]:
    """The predictions as the label column calls them; numbers as doubles, as all of Spark ML's evaluators want them."""
    if output.classes is None:
        return predictions
    dtype = {str: object, bool: bool}.get(type(output.classes[0]), np.float64)
    classes: npt.NDArray[Any] = np.array(output.classes, dtype=dtype)
    return classes[predictions.astype(np.int64)]


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
