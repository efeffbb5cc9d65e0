"""Signatures of models for tests."""

from __future__ import annotations

from typing import Any

from sparkdl.data import Column
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.signature import ModelOutput, ModelSignature


def make_inputs(*names: str, dtypes: tuple[str, ...] = (), **changes: Any) -> ModelInputs:
    """Inputs of float32 scalars; other columns are given by name: ``x=Column(...)``."""
    columns = tuple(changes.pop(name, Column(name=name, dtype="float32")) for name in names)
    dtypes = dtypes or ("float32",) * len(names)
    inputs = tuple(ModelInput(name=name, dtype=dtype) for name, dtype in zip(names, dtypes, strict=True))
    return ModelInputs(columns=columns, inputs=inputs, **changes)


def make_signature(
    shape: tuple[int, ...] = (), kind: Any = "value", prediction_shape: tuple[int, ...] = (), **changes: Any
) -> ModelSignature:
    """A signature with one input column ``x`` and one output ``y``."""
    column = Column(name="x", dtype="float32", shape=shape)
    output = ModelOutput(name="y", kind=kind, shape=prediction_shape, **changes)
    return ModelSignature(inputs=make_inputs("x", x=column), outputs=(output,))
