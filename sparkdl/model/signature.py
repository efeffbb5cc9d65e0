"""The inputs and outputs of a trained model, stored with the model so that it can be used without its fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

from sparkdl.data import Column
from sparkdl.model.inputs import DEFAULT_BATCH_SIZE, GivenBy, ModelInput, ModelInputs

if TYPE_CHECKING:
    from sparkdl.model.losses import PredictionKind

_FROM_FOOTERS = ("value_range", "num_nulls", "object_bytes")


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """One output of a model and its meaning.

    Attributes:
        name: name of the label column on which it was trained.
        kind: meaning of the numbers, see :func:`sparkdl.model.losses.prediction_kind`.
        shape: shape of one row's prediction; ``()`` for a number.
        num_classes: number of classes; None if the output does not distinguish classes.
        classes: value of each class in the label column; None where the column holds the numbers of the classes.
        thresholds: number for each class that divides its probability before the largest is predicted; None for the
            most probable class.
    """

    name: str
    kind: PredictionKind
    shape: tuple[int, ...] = ()
    num_classes: int | None = None
    classes: tuple[Any, ...] | None = None
    thresholds: tuple[float, ...] | None = None

    @property
    def is_sequence(self) -> bool:
        """Whether a row's prediction is a text or an array of tokens, of any length."""
        return self.kind in ("text", "tokens")


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """The inputs and outputs of a model.

    Attributes:
        inputs: feature columns as in the training data, and how the model is called with them.
        outputs: one output for each label column.
        batch_size: number of rows per forward pass of a prediction, unless its caller chooses another.
        max_batch_size: largest number of rows that the module takes at once; None for any.
    """

    inputs: ModelInputs
    outputs: tuple[ModelOutput, ...]
    batch_size: int = DEFAULT_BATCH_SIZE
    max_batch_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the signature as values for JSON, without the function that prepares features."""
        inputs = self.inputs
        columns = [asdict(column) for column in inputs.columns]
        return {
            "columns": [
                {name: value for name, value in column.items() if name not in _FROM_FOOTERS}
                for column in columns
            ],
            "inputs": [asdict(entry) for entry in inputs.inputs],
            "given_by": inputs.given_by,
            "padding_value": inputs.padding_value,
            "outputs": [asdict(output) for output in self.outputs],
            "batch_size": self.batch_size,
            "max_batch_size": self.max_batch_size,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelSignature:
        """Return the signature from the result of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: if ``content`` is something else.
        """
        return cls(
            inputs=ModelInputs(
                columns=tuple(Column(**_with_tuples(column)) for column in content["columns"]),
                inputs=tuple(ModelInput(**entry) for entry in content["inputs"]),
                given_by=_given_by(content),
                padding_value=content["padding_value"],
            ),
            outputs=tuple(ModelOutput(**_with_tuples(output)) for output in content["outputs"]),
            batch_size=content.get("batch_size", DEFAULT_BATCH_SIZE),
            max_batch_size=content.get("max_batch_size"),
        )


def _given_by(content: Mapping[str, Any]) -> GivenBy:
    given_by: GivenBy = content["given_by"]
    if given_by not in get_args(GivenBy):
        raise ValueError(f"given_by is {given_by!r}, and none of {', '.join(get_args(GivenBy))}")
    return given_by


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
