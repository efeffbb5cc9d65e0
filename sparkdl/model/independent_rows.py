"""Check that a row's outputs depend on that row alone, by trying two rows together and each of them alone.

A model that computes over the rows of a batch would make other predictions if a DataFrame were divided otherwise.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.errors import DataError, ParamError, list_names
from sparkdl.foreign_errors import errors_as
from sparkdl.model.heads import Head, outputs_of_rows
from sparkdl.model.inputs import Arrays, ModelInputs, find_dtype

_logger = logging.getLogger(__name__)


def check_rows_are_independent(
    model: nn.Module, inputs: ModelInputs, heads: Sequence[Head], pair: Arrays
) -> None:
    """Check that the model's outputs for a row are the same alone and beside another row.

    Args:
        model: the model, on the CPU and in eval() mode; the trial must not be the user's own, as buffers may change.
        inputs: inputs of the model, with their dtypes.
        heads: labels and losses of the model's outputs.
        pair: two rows of the data, as different as possible, columns of shape ``(2, *shape)``.

    Raises:
        ParamError: if they are not.
        DataError: if the model takes one row and not two.
    """
    dependence = _dependence(model, inputs, heads, pair)
    if dependence is None:
        return
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        again = [_outputs_of(model, inputs, heads, pair, [0]) for _ in range(2)]
    if any(_largest_difference(again[0][name], again[1][name]) for name in again[0]):
        _logger.warning(
            "The model %s returns other outputs for the same row each time in eval() mode, so its predictions will not "
            "repeat.",
            type(model).__name__,
        )
        return
    # In double precision, rounding differs far less than outputs that depend on a row. Not every model has one.
    with suppress(Exception):
        doubles = {
            column.name: torch.float64 if "float" in column.dtype else find_dtype(column.dtype)
            for column in inputs.inputs
        }
        wide = copy.deepcopy(model).double()
        if _dependence(wide, inputs.with_dtypes(doubles), heads, pair) is None:
            return
    alone, together = dependence
    prepared = " The same holds for prepareFeatures." if inputs.prepare is not None else ""
    raise ParamError(
        f"Param model returns {alone:.6g} for a row alone and {together:.6g} for the same row beside another one, in "
        f"eval() mode: a row's prediction must not depend on other rows. {layers_over_rows(model)}Compute "
        f"nothing over dimension 0, such as a mean, a softmax or a sum, and mask what pads shorter arrays.{prepared}"
    )


def _dependence(
    model: nn.Module, inputs: ModelInputs, heads: Sequence[Head], pair: Arrays
) -> tuple[float, float] | None:
    """Return a number of an output for a row alone and beside another row, if they differ by more than rounding."""
    floating = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        together = _outputs_of(model, inputs, heads, pair, [0, 1])
        for index in (0, 1):
            for name, alone in _outputs_of(model, inputs, heads, pair, [index]).items():
                # Where rows differ in length, the outputs of shorter ones can be padded, too.
                region = (slice(index, index + 1), *(slice(length) for length in alone.shape[1:]))
                beside = together[name][region]
                if not alone.is_floating_point() or beside.shape != alone.shape:
                    continue
                tolerance = math.sqrt(max(torch.finfo(dtype).eps for dtype in {*floating, alone.dtype}))
                finite = torch.cat([alone.flatten(), beside.flatten()]).double().abs().nan_to_num(0, 0, 0)
                scale = max(float(finite.max()) if finite.numel() else 0.0, _SMALLEST_SCALE)
                difference = _largest_difference(alone, beside)
                if difference is not None and not difference[0] <= tolerance * scale:
                    return difference[1:]
    return None


_SMALLEST_SCALE = 1e-3
"""Magnitude of outputs below which their rounding is compared as if they were of this magnitude."""


def _largest_difference(one: Tensor, other: Tensor) -> tuple[float, float, float] | None:
    """Return the largest difference between tensors of one shape, and the two numbers; None if they are equal."""
    if one.shape != other.shape or not one.numel():
        return None
    one, other = one.double().flatten(), other.double().flatten()
    is_equal = (one == other) | (one.isnan() & other.isnan())
    if is_equal.all():
        return None
    differences = torch.where(is_equal, 0.0, (one - other).abs().nan_to_num(nan=math.inf))
    index = int(differences.argmax())
    return float(differences[index]), float(one[index]), float(other[index])


def _outputs_of(
    model: nn.Module, inputs: ModelInputs, heads: Sequence[Head], rows: Arrays, indices: list[int]
) -> dict[str, Tensor]:
    what = (
        f"The model {type(model).__name__} takes the first row, and fails on {len(indices)} of the first rows"
    )
    with errors_as(DataError, what):
        arrays = inputs.prepare_batch({name: values[indices] for name, values in rows.items()})
        returned = inputs.apply(model, arrays, torch.device("cpu"))
    return outputs_of_rows(returned, heads, len(indices))


def layers_over_rows(model: nn.Module) -> str:
    """Return a sentence for each kind of layer that computes over the rows of a batch in eval() mode; empty if none."""
    normalizing, quantized = [], []
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.running_mean is None or layer.training):
            normalizing.append(f"{name!r} ({type(layer).__name__})")
        elif ".quantized.dynamic" in type(layer).__module__:
            quantized.append(f"{name!r} ({type(layer).__name__})")
    sentences = ""
    if normalizing:
        sentences += (
            f"Layers {list_names(normalizing)} normalize by the rows of the batch in eval() mode, too: give them "
            "track_running_stats=True, and let eval() reach them, or use LayerNorm or GroupNorm. "
        )
    if quantized:
        sentences += (
            f"Layers {list_names(quantized)} are quantized by the range of the whole batch: train the model without "
            "dynamic quantization. "
        )
    return sentences
