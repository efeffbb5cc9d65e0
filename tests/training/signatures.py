"""Signatures of models, and modules as executors get them, for tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparkdl.data import Column
from sparkdl.model.architecture import split_module
from sparkdl.model.inputs import ModelInput, ModelInputs
from sparkdl.model.signature import ModelOutput, ModelSignature
from sparkdl.model.weights_file import weights_as_bytes


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


def packed(module: nn.Module) -> tuple[bytes, bytes]:
    """The structure and the weights of a module, as a ScoringModel holds them."""
    structure, tensors = split_module(module)
    return structure, weights_as_bytes(tensors)
