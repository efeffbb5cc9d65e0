"""Writes a model's module as a file that other programs run: ONNX, or a program of ``torch.export``.

Runs on the *driver*. The file is tried on example rows, all together and each alone, and must compute what the module
does. It holds the module alone: neither the function that prepares features, nor what becomes of scores afterwards. An
ONNX file says in its metadata, under ``sparkdl.outputs``, what its outputs mean.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sparkdl.errors import ParamError, SerializationError
from sparkdl.foreign_errors import errors_as, needing
from sparkdl.model.architecture import evaluating
from sparkdl.model.heads import NO_LABEL, first_output, output_of_each
from sparkdl.model.program import NetworkProgram

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from sparkdl.model.inputs import ModelInputs
    from sparkdl.model.saved_model import SavedModel

FORMATS = {"onnx": ".onnx", "export": ".pt2"}
"""Formats with the ends of the names of their files."""

METADATA = "sparkdl.outputs"

_NOISE = 1e-3
"""Difference between outputs that other kernels can make by rounding, relative to the largest output."""

_REMEDY = (
    "The module has to be traceable by torch.export: its forward may not choose what to compute by the values of "
    "tensors."
)


def format_of(path: str, chosen: str | None) -> str:
    """Return the format of a file, the chosen one or else the one that its name ends with.

    Raises:
        ParamError: if there is no such format, or the name says none.
    """
    if chosen in FORMATS:
        return str(chosen)
    if chosen is not None:
        raise ParamError(f"format is {chosen!r}, and takes {' or '.join(map(repr, FORMATS))}.")
    for name, end in FORMATS.items():
        if path.endswith(end):
            return name
    raise ParamError(f"{path} ends neither with .onnx nor with .pt2. Set format to 'onnx' or 'export'.")


def export_model(
    model: SavedModel, examples: Sequence[Mapping[str, Tensor]], path: Path, format_: str
) -> None:
    """Write a module to a local file, after trying the file on example rows.

    Args:
        model: the module on the CPU, and its signature.
        examples: inputs of example rows, as :meth:`ModelInputs.example_batches` makes them. Dimensions in which those
            of the batches differ may differ in the file; its number of rows may differ in any case.
        path: path of the file.
        format_: one of :data:`FORMATS`.

    Raises:
        ParamError: if a library is missing, or the module is TorchScript.
        SerializationError: if the module cannot be exported, or the file computes something else.
    """
    onnx = _import_onnx() if format_ == "onnx" else None
    signature = model.signature
    if any(output.is_sequence for output in signature.outputs):
        raise ParamError(
            "A model that continues texts cannot be exported, as it calls its network once for each token. Use "
            "save_pretrained(folder), which writes the network for transformers and the programs that read its folders."
        )
    if isinstance(model.module, NetworkProgram) and model.module.is_script:
        raise ParamError(
            "A model of TorchScript cannot be exported, as torch.export follows Python code. Make a model of the "
            "module from which torch.jit made it."
        )
    module = _Outputs(model.module, signature.inputs, [output.name for output in signature.outputs])
    together, *alone = (tuple(batch[entry.name] for entry in signature.inputs.inputs) for batch in examples)
    rows = range(len(together[0])) if not alone else ()
    batches = [together, *alone, *(tuple(tensor[row : row + 1] for tensor in together) for row in rows)]
    with evaluating(module):
        program = _export(module, batches)
        if onnx is None:
            with errors_as(SerializationError, "The model cannot be written as a program of torch.export"):
                torch.export.save(program, path)
                call: Callable[..., Any] = torch.export.load(path).module()
        else:
            described = json.dumps([asdict(output) for output in signature.outputs])
            call = _write_onnx(
                onnx, program, path, [entry.name for entry in signature.inputs.inputs], described
            )
        for batch in batches:
            what = f"{path.name} cannot compute {len(batch[0])} of the example rows, and was not written"
            with errors_as(SerializationError, what, _REMEDY):
                made = call(*batch)
            _compare(made, module(*batch), path)


class _Outputs(nn.Module):
    """Calls a module with its inputs by position, and returns the outputs that have a name, in their order."""

    def __init__(self, module: nn.Module, inputs: ModelInputs, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self._inputs, self._outputs = module, inputs, list(names)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        names = [entry.name for entry in self._inputs.inputs]
        made = self._inputs.call(self.module, dict(zip(names, tensors, strict=True)))
        of_each = first_output(made) if self._outputs == [NO_LABEL] else output_of_each(made, self._outputs)
        return tuple(of_each[name] for name in self._outputs)


def _export(module: _Outputs, batches: Sequence[tuple[Tensor, ...]]) -> ExportedProgram:
    """Return a program for any number of rows, and any length of the dimensions in which the batches differ."""
    together, *alone = batches
    if len(alone) == 1:  # a dimension of length 1 would be fixed
        together = tuple(torch.cat([tensor, tensor]) for tensor in together)
    shapes = tuple(
        {
            dim: torch.export.Dim.AUTO
            for dim in range(tensor.ndim)
            if dim == 0 or len({batch[index].shape[dim] for batch in batches}) > 1
        }
        for index, tensor in enumerate(together)
    )
    try:
        return torch.export.export(module, together, dynamic_shapes=(shapes,))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]  # the further lines are about torch
        raise SerializationError(
            f"The model cannot be exported: {type(error).__name__}: {why.rstrip('.')}. {_REMEDY}"
        ) from error


def _import_onnx() -> Any:
    with needing("The format 'onnx'", "onnx", "onnx", "onnxscript", "onnxruntime"):
        for name in ("onnx", "onnxscript"):  # torch writes the file by them
            import_module(name)
        return import_module("onnxruntime")


def _write_onnx(
    runtime: Any, program: ExportedProgram, path: Path, inputs: Sequence[str], described: str
) -> Callable[..., Any]:
    """Write a program as ONNX, and return a function that runs the file."""
    outputs = [output["name"] for output in json.loads(described)]
    with errors_as(SerializationError, "The model cannot be written as ONNX"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = torch.onnx.export(
            program, dynamo=True, input_names=list(inputs), output_names=outputs, verbose=False
        )
        made.model.metadata_props[METADATA] = described
        _keep_names_apart(made.model.graph)
        made.save(os.fspath(path))
        session = runtime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])

    def call(*tensors: Tensor) -> list[Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        return [torch.from_numpy(np.asarray(output)) for output in session.run(None, arrays)]

    return call


def _keep_names_apart(graph: Any) -> None:
    """Rename values inside a graph that have the name of an input or output, such as those of an embedding."""
    outside = {*graph.inputs, *graph.outputs}
    names = {value.name for value in outside}
    for node in graph:
        for number, value in enumerate(node.outputs):
            if value not in outside and value.name in names:
                value.name = f"{node.name}.{value.name}.{number}"


def _compare(made: Sequence[Tensor], expected: Sequence[Tensor], path: Path) -> None:
    for one, other in zip(made, expected, strict=True):
        scale = other.double().abs().nan_to_num(0, 0, 0).max() if other.numel() else torch.tensor(0.0)
        if one.shape != other.shape or not torch.allclose(
            one.double(), other.double(), rtol=0, atol=float(scale) * _NOISE, equal_nan=True
        ):
            raise SerializationError(
                f"{path.name} does not compute what the module does: for {len(other)} of the example rows it returns "
                f"{_describe(one)}, and the module {_describe(other)}. It was not written. {_REMEDY}"
            )


def _describe(tensor: Tensor) -> str:
    return (
        f"shape {tuple(tensor.shape)} beginning with {[round(x, 4) for x in tensor.flatten()[:3].tolist()]}"
    )
