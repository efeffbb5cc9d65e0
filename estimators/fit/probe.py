"""Tries the model, the loss and the optimizer on the first rows, before ranks are started.

One forward and backward pass detects errors that would otherwise occur on every rank at once, such as features that do
not fit the model and outputs that do not fit the loss. It also finds the number of classes, and the dtypes in which
columns enter the model and the loss.

A loss of the user's own is checked for comparing every row with every other one, which torch does not report. Outputs
that a loss of torch would misinterpret, such as raw scores where it expects probabilities, are refused on the first
row. The gradients that a backward pass leaves in the model show whether an optimizer can step with them.

That a row's outputs do not depend on the rows beside it is checked by :mod:`sparkdl.model.independent_rows`.

The trials use copies of the model that need little memory. Parameters are copied, the smallest first, up to a limit
in bytes. Beyond it the copy has new Parameter objects over the memory of the model's own parameters: code that gets the
copy may compute with them, but must not change them. A parameter on the device meta becomes an expanded tensor of one
value, which takes no memory.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from sparkdl.errors import DataError, ParamError, list_names
from sparkdl.foreign_errors import errors_as
from sparkdl.model.decisions import decide
from sparkdl.model.heads import Head, outputs_of_rows
from sparkdl.model.independent_rows import check_rows_are_independent, layers_over_rows
from sparkdl.model.inputs import (
    Arrays,
    ModelInputs,
    candidate_dtypes,
    dtype_name,
    number_dtype,
    own_dtype,
    to_tensor,
)
from sparkdl.model.losses import (
    LossFunction,
    compute_loss,
    is_class_loss,
    is_torch_loss,
    match_targets,
    prediction_kind,
)
from sparkdl.training.update import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.optim import Optimizer

    from sparkdl.model.losses import PredictionKind
    from sparkdl.training.spec import OptimizerFactory


_logger = logging.getLogger(__name__)

_NUM_ROWS = 3
"""Number of rows of the trial; it is seldom the size of another dimension of a tensor."""

_CROSSED = (_NUM_ROWS, _NUM_ROWS)


def crosses_rows(loss: LossFunction, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether the loss broadcasts outputs of shape ``(N, 1)`` with labels of shape ``(N,)`` to ``(N, N)``.

    Args:
        loss: loss function, tried on copies of one row.
        outputs: outputs of one row, of any shape; other shapes than ``(1, 1)`` are not checked.
        targets: labels of that row, of any shape; other shapes than ``(1,)`` are not checked.
    """
    if outputs.shape != (1, 1) or targets.shape != (1,):
        return False
    watch = _ShapeObserver()
    # If the loss raises here, it raises again, and is reported, when it is tried on the actual outputs.
    with suppress(Exception), torch.no_grad(), watch:
        loss(outputs.detach().repeat(_NUM_ROWS, 1), targets.repeat(_NUM_ROWS))
    return watch.has_crossed


class _ShapeObserver(TorchFunctionMode):
    """Observes every torch function that is called within this context."""

    has_crossed = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = {tuple(argument.shape) for argument in args if isinstance(argument, Tensor)}
        if (
            isinstance(result, Tensor)
            and result.shape == _CROSSED
            and shapes == {(_NUM_ROWS, 1), (_NUM_ROWS,)}
        ):
            self.has_crossed = True
        return result


_MAX_LOG_OF_SUM = 0.1
"""Maximum distance of the log of the sum of all probabilities from 0, by half-precision rounding or a small epsilon."""


def check_output_range(loss: LossFunction, outputs: Tensor) -> None:
    """Check that outputs can be the probabilities that BCELoss takes, or the log probabilities that NLLLoss takes.

    Args:
        loss: loss function; only torch's BCELoss and NLLLoss are checked.
        outputs: outputs of the first row, of shape ``(rows, ...)``, for NLLLoss ``(rows, classes, ...)``.

    Raises:
        ParamError: if they cannot; the message names the layer or the loss that fixes it.
    """
    if not is_torch_loss(loss):
        return
    values = outputs.detach()
    if isinstance(loss, nn.BCELoss):
        outside = values[(values < 0) | (values > 1)]
        if outside.numel():
            raise ParamError(
                f"Param loss is BCELoss, which takes a probability, and the model's output for the first row is "
                f"{outside[0].item():.4g}, outside 0 to 1. End the model with nn.Sigmoid(), or leave the model as it "
                "is and use nn.BCEWithLogitsLoss()."
            )
    elif isinstance(loss, nn.NLLLoss):
        logs = values.float().logsumexp(dim=1)
        wrong = logs[logs.abs() > _MAX_LOG_OF_SUM]
        if wrong.numel():
            raise ParamError(
                "Param loss is NLLLoss, which takes the log of each class's probability, and the model's outputs for "
                f"the first row make probabilities whose sum is {wrong[0].exp().item():.4g}, not 1. End the model with "
                "nn.LogSoftmax(dim=1), or leave the model as it is and use nn.CrossEntropyLoss()."
            )


_SPARSE = ("_saved_sparse", "_saved_sparse_grad")
"""Names, in nodes of the autograd graph, of the argument of embeddings and gather that makes a gradient sparse."""


@dataclass(frozen=True)
class Gradients:
    """Which gradients the trainable parameters got.

    Attributes:
        any_found: whether any parameter got a gradient.
        any_missing: whether any parameter got none.
        are_sparse: whether any gradient is a sparse tensor.
    """

    any_found: bool
    any_missing: bool
    are_sparse: bool


class TrialGradients:
    """The backward pass of a trial, and which gradients it yields; large gradients are not computed.

    Args:
        module: trial copy of the model, on the CPU.
        shared: its parameters that are not copies: they are only looked up in the loss's autograd graph.
    """

    def __init__(self, module: nn.Module, shared: Collection[nn.Parameter]) -> None:
        self._shared = {id(parameter): parameter for parameter in shared}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._copied = [parameter for parameter in trained if id(parameter) not in self._shared]
        self._num_trained = len(trained)
        self._seen: set[int] = set()
        self._has_sparse = False

    @property
    def found(self) -> Gradients:
        """The gradients that were found so far."""
        return Gradients(
            any_found=bool(self._seen),
            any_missing=len(self._seen) < self._num_trained,
            are_sparse=self._has_sparse,
        )

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a scalar loss and note its gradients; it can be called several times."""
        if not self._shared or not self._leaves_out_shared(loss):
            loss.backward(retain_graph=True)
        for parameter in (*self._copied, *self._shared.values()):
            if parameter.grad is not None:
                self._note(parameter, is_sparse=parameter.grad.is_sparse)
                if id(parameter) in self._shared:
                    parameter.grad = None

    def _leaves_out_shared(self, loss: Tensor) -> bool:
        """Compute gradients of the copied parameters only, and look up the shared ones in the autograd graph.

        Return False, without a backward pass, if a node of the graph hides what is inside.
        """
        used: dict[int, bool] = {}
        nodes = [loss.grad_fn] if loss.grad_fn is not None else []
        visited = set(nodes)
        while nodes:
            node = nodes.pop()
            if isinstance(node, BackwardCFunction):  # checkpointed layers, or other custom functions
                return False
            for following, _ in node.next_functions:
                parameter = self._shared.get(id(getattr(following, "variable", None)))
                if parameter is not None:
                    is_sparse = any(getattr(node, name, False) for name in _SPARSE)
                    used[id(parameter)] = used.get(id(parameter), False) or is_sparse
                elif following is not None and following not in visited:
                    visited.add(following)
                    nodes.append(following)
        loss.backward(retain_graph=True, inputs=self._copied or [loss])
        for identity, is_sparse in used.items():
            self._note(self._shared[identity], is_sparse=is_sparse)
        return True

    def _note(self, parameter: nn.Parameter, *, is_sparse: bool) -> None:
        self._seen.add(id(parameter))
        self._has_sparse = self._has_sparse or is_sparse


def try_optimizer(optimizer: Optimizer, left_out: Collection[nn.Parameter] = ()) -> None:
    """Step an optimizer as if it had been made without the parameters ``left_out``, which it then cannot change.

    Raises:
        ParamError: if the optimizer cannot step by gradients alone.
    """
    others = {id(parameter) for parameter in left_out}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    what = f"Param optimizer makes {type(optimizer).__name__}, which cannot step by gradients alone"
    try:
        with errors_as(ParamError, what, "Choose one that can, such as SGD or Adam."):
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [parameter for parameter in params if id(parameter) not in others]
            optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params


T = TypeVar("T")

_ANY_VALUE = 0.01

COPIED_BYTES = 64 << 20
"""Maximum size of all copied parameters together."""


def trial_copy(value: T, module: nn.Module, copied_bytes: int = COPIED_BYTES) -> tuple[T, list[nn.Parameter]]:
    """Return a deep copy of a value that holds a module, and the copy's parameters that are not copied.

    Those parameters share the memory of the module's parameters, or stand for parameters on the device meta.

    Args:
        value: the module, or an object that refers to it; objects that are shared within stay shared.
        module: module whose parameters are copied up to the limit, and shared with the copy beyond it.
        copied_bytes: maximum size of all copied parameters and of the tensors computed from them.
    """
    memo: dict[int, Any] = {}
    shared = []
    seen: set[int] = set()
    computed = (tensor for part in module.modules() for tensor in _find_computed(vars(part), seen))
    for tensor in sorted((*module.parameters(), *computed), key=_num_bytes):
        if tensor.is_meta:
            value_everywhere = torch.full((), _ANY_VALUE).to(tensor.dtype).expand(tensor.shape)
            shared.append(nn.Parameter(value_everywhere, requires_grad=tensor.requires_grad))
            memo[id(tensor)] = shared[-1]
            continue
        copied_bytes -= _num_bytes(tensor)
        if not tensor.is_leaf:
            there = tensor.detach()
            memo[id(tensor)] = there if copied_bytes < 0 else there.clone()
        elif copied_bytes < 0 and type(tensor) is nn.Parameter and tensor.layout == torch.strided:
            there = tensor.detach().to("cpu")
            shared.append(nn.Parameter(there, requires_grad=tensor.requires_grad))
            memo[id(tensor)] = shared[-1]
    return copy.deepcopy(value, memo), shared


def _find_computed(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that a module has computed from parameters and keeps, each once; weight_norm and pruning do so.

    A forward pass computes them again. ``deepcopy`` refuses them because they have an autograd graph.

    Args:
        value: the module's attributes, or one of them: LSTMs keep their weights in a list.
        seen: identities of the objects that were visited; new ones are added.
    """
    if not isinstance(value, Tensor | dict | list | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    if not isinstance(value, Tensor):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _find_computed(entry, seen)
    elif not value.is_leaf:
        yield value


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # a sparse tensor has no ``nbytes``


_CPU = torch.device("cpu")
_MAX_MIXED = 4
"""Maximum number of integer columns for which each combination of dtypes is tried."""

_WANTS_INTEGERS = re.compile("scalar types?:? Long")
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|tensor type|input type|result type|not implemented for '", re.IGNORECASE
)
"""Matches torch's error messages about a tensor whose dtype, rather than its shape, is wrong for a layer."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of a trial with one row.

    Attributes:
        inputs: inputs, with the dtypes in which they enter the model.
        heads: heads, with the dtypes in which labels enter the losses.
        num_classes: number of classes of each head; None for a loss that is not over classes.
        prediction_shapes: shape of one row's prediction, by the name of each output: a label column, or NO_LABEL.
        gradients: gradients that the losses left; there are none if the user's step computes the loss.
        optimizer: optimizer that the factory made for a copy of the model.
    """

    inputs: ModelInputs
    heads: tuple[Head, ...]
    num_classes: tuple[int | None, ...]
    prediction_shapes: Mapping[str, tuple[int, ...]]
    gradients: Gradients
    optimizer: Optimizer


def try_outputs(
    model: nn.Module, inputs: ModelInputs, heads: Sequence[Head], row: Arrays, pair: Arrays
) -> tuple[ModelInputs, dict[str, Tensor], nn.Module, list[nn.Parameter]]:
    """Pass one row through a copy of a model, and a pair of rows, whose outputs must not depend on each other.

    The arguments and errors are those of :func:`probe`.

    Returns:
        The inputs, with the dtypes in which they enter the model; the output for the row by its name, tensors of shape
        ``(1, *shape)``; the copy of the model; and its parameters that are not copies.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ParamError(
            "Param model has lazy layers without weights. Call the model once on a batch before."
        )
    # In eval() mode, because BatchNorm cannot normalize one row; on a copy, because buffers may change in any mode.
    trial, shared = trial_copy(model, model)
    trial.to(_CPU).eval()
    inputs, returned = _try_features(trial, inputs, inputs.prepare_batch(row))
    outputs = outputs_of_rows(returned, heads, 1)
    check_rows_are_independent(trial, inputs, heads, pair)
    return inputs, outputs, trial, shared


def probe(
    model: nn.Module,
    optimizer: OptimizerFactory,
    *,
    inputs: ModelInputs,
    heads: Sequence[Head],
    row: Arrays,
    labels: Arrays,
    pair: Arrays,
    weighted_by: str = "",
) -> ProbeResult:
    """Pass one row through a copy of the model and its losses, and a pair of rows through the model.

    Args:
        model: the model; neither its weights nor its buffers change.
        optimizer: factory of the optimizer; called once, with the copy's parameters.
        inputs: inputs of the model; the trial determines their dtypes.
        heads: labels and losses of the model's outputs; the trial determines the dtypes of the labels. A head without a
            loss belongs to the user's step.
        row: one row of the data, columns of shape ``(1, *shape)``.
        labels: labels of the row as numbers, columns of shape ``(1, *shape)``.
        pair: two rows of the data, as different as possible, columns of shape ``(2, *shape)``.
        weighted_by: name of the Param that gives rows weights; empty if none does. Losses then have to return one value
            per row.

    Raises:
        DataError: if the model does not accept the features, or a loss the labels.
        ParamError: if the model has lazy layers without weights, its outputs for a row depend on other rows, are not
            tensors with one entry per row or do not suit the loss, the factory makes no optimizer, the optimizer cannot
            step by gradients alone, or rows are weighted and a loss reduces over them.
    """
    _warn_about_frozen_statistics(model)
    inputs, outputs, trial, shared = try_outputs(model, inputs, heads, row, pair)
    gradients = TrialGradients(trial, shared)
    losses = {head.label.name: head.loss for head in heads}
    made = make_optimizer(optimizer, trial)
    num_classes = tuple(
        _count_classes(head.loss, outputs[head.label.name]) if head.loss is not None else None
        for head in heads
    )
    dtypes = [
        _try_labels(
            trial, gradients, head, outputs.get(head.label.name), labels[head.label.name], weighted_by
        )
        for head in heads
    ]
    heads = tuple(
        replace(head, label=replace(head.label, dtype=dtype_name(dtype)))
        for head, dtype in zip(heads, dtypes, strict=True)
    )
    if gradients.found.any_found:
        try_optimizer(made, shared)
    return ProbeResult(
        inputs=inputs,
        heads=heads,
        num_classes=num_classes,
        prediction_shapes={
            name: prediction_shape("value" if loss is None else prediction_kind(loss), tensor)
            for name, tensor in outputs.items()
            for loss in [losses.get(name)]
        },
        gradients=gradients.found,
        optimizer=made,
    )


def prediction_shape(kind: PredictionKind, outputs: Tensor) -> tuple[int, ...]:
    """Return the shape of one row's prediction; ``()`` for a number."""
    shape = tuple(decide(outputs.detach(), kind).shape[1:])
    return () if shape == (1,) else shape


def _try_features(
    model: nn.Module, inputs: ModelInputs, arrays: Mapping[str, npt.NDArray[Any]]
) -> tuple[ModelInputs, Any]:
    """Return the inputs with the first dtypes that the model accepts, and what the model returned."""
    failures: list[tuple[Exception, tuple[torch.dtype, ...]]] = []
    for dtypes in _dtype_choices(model, arrays, are_prepared=inputs.prepare is not None):
        tried = inputs.with_dtypes(dict(zip(arrays, dtypes, strict=True)))
        try:
            return tried, tried.apply(model, arrays, _CPU)
        except Exception as error:
            failures.append((error, dtypes))
    # The first failure that is not about dtypes, else the first one, of the columns' own dtypes.
    failure, tried_dtypes = next(
        (known for known in failures if not _ABOUT_DTYPES.search(str(known[0]))), failures[0]
    )
    reason = f"{type(failure).__name__}: {failure}"
    if "Expected more than 1 value per channel" in reason:
        advice = layers_over_rows(model) or (
            "It normalizes by the rows of the batch in eval() mode, too. Use LayerNorm or GroupNorm."
        )
        raise ParamError(
            f"The model {type(model).__name__} cannot compute one row alone, and a row's prediction must not depend on "
            f"other rows: {reason.rstrip('.')}. {advice.rstrip()}"
        ) from failure
    if _WANTS_INTEGERS.search(reason):
        reason = f"{reason.rstrip('.')}. Cast whole numbers to bigint; decimals are taken as doubles."
    from sparkdl.tracebacks import line_of_user  # only a failure needs it

    if line := line_of_user(failure):
        reason = f"{reason.rstrip('.')}. It was raised at {line}"
    given = {
        name: _describe(array, str(dtype).removeprefix("torch."))
        for (name, array), dtype in zip(arrays.items(), tried_dtypes, strict=True)
    }
    if len(given) == 1:
        ((name, shape),) = given.items()
        subject = "The matrix of the features" if inputs.given_by == "matrix" else f"Column {name!r}"
        raise DataError(
            f"{subject} does not fit the model {type(model).__name__}: a batch {shape} gave {reason}"
        ) from failure
    columns = list_names([f"{name!r} {shape}" for name, shape in given.items()])
    hint = (
        f'{"" if reason.endswith(".") else "."} Where it takes them as one matrix, set passFeaturesBy="matrix".'
        if inputs.are_numbers and inputs.given_by == "position"
        else ""
    )
    raise DataError(
        f"The model {type(model).__name__} cannot be called with {columns}: {reason}{hint}"
    ) from failure


def _describe(array: npt.NDArray[Any], dtype: str) -> str:
    """Describe an input of the model: its shape and dtype, and the dtype to which it was converted, if that differs."""
    passed = "" if dtype == str(array.dtype) else f", passed as {dtype},"
    return f"of shape {array.shape} and dtype {array.dtype}{passed}"


def _dtype_choices(
    model: nn.Module, arrays: Mapping[str, npt.NDArray[Any]], *, are_prepared: bool
) -> Iterator[tuple[torch.dtype, ...]]:
    """Yield dtypes for all inputs: first those in which integers stay integers, then fewer and fewer integers.

    What a function of the user's has prepared comes first in its own dtypes: a module that scales bytes by their type
    takes int64, too, and returns something else. The dtypes of columns, which Spark and Parquet chose, come last.
    """
    others = [candidate_dtypes(str(array.dtype), model) for array in arrays.values()]
    own = tuple(
        own_dtype(str(array.dtype)) or dtypes[0]
        for array, dtypes in zip(arrays.values(), others, strict=True)
    )
    pairs = list(zip(own, others, strict=True))
    tried = [tuple(dict.fromkeys((dtype, *dtypes))) for dtype, dtypes in pairs] if are_prepared else others
    if sum(len(dtypes) > 1 for dtypes in tried) <= _MAX_MIXED:
        yield from product(*tried)
    else:
        if are_prepared:
            yield own
            yield tuple(dtypes[0] if dtype.is_floating_point else dtype for dtype, dtypes in pairs)
        yield tuple(dtypes[0] for dtypes in others)
        yield tuple(dtypes[-1] for dtypes in others)
    if not are_prepared:
        yield own


def _warn_about_frozen_statistics(model: nn.Module) -> None:
    frozen = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and not layer.training
    ]
    if model.training and frozen:
        _logger.warning(
            "The BatchNorm layers %s are in eval() mode. A fit calls model.train(), which makes them normalize by each "
            "batch and update their statistics. To keep these, override train() of the model to call their eval().",
            list_names(frozen, 5),
        )


def _count_classes(loss: LossFunction, outputs: Tensor) -> int | None:
    if not is_class_loss(loss):
        return None
    if outputs.ndim < 2:
        raise ParamError(
            f"{type(loss).__name__} takes one score per class, and the model returned shape "
            f"{tuple(outputs.shape)} for 1 row. Give the model an output of shape (rows, classes)."
        )
    return int(outputs.shape[1])


def _try_labels(
    model: nn.Module,
    gradients: TrialGradients,
    head: Head,
    outputs: Tensor | None,
    labels: npt.NDArray[np.generic],
    weighted_by: str,
) -> torch.dtype:
    """Return the dtype in which the labels of a head enter its loss; compute the gradients of the loss."""
    name, loss = head.label.name, head.loss
    if loss is None:
        return torch.int64 if labels.dtype.kind in "biu" else number_dtype(model)
    assert outputs is not None, "a head with a loss has an output"
    failures = []
    row_weights = None
    if weighted_by:  # the row twice, as with one row a value per row looks like a mean of shape (1,)
        outputs, labels = torch.cat([outputs, outputs]), np.concatenate([labels, labels])
        row_weights = torch.ones(2)
    for dtype in _label_dtypes(model, loss, labels):
        targets = match_targets(loss, outputs, to_tensor(labels, dtype, _CPU))
        if is_torch_loss(loss) and not is_class_loss(loss) and targets.shape != outputs.shape:
            raise DataError(
                f"Column {name!r} has labels of shape {labels.shape[1:]} per row, and the model's output has "
                f"{tuple(outputs.shape[1:])}. {type(loss).__name__} compares them element by element."
            )
        check_output_range(loss, outputs)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Using a target size")  # a broadcast between rows
                term = compute_loss(loss, outputs, targets, row_weights, weighted_by=weighted_by)
                gradients.backward(term.mean)
        except ParamError:
            raise
        except Exception as error:
            failures.append(error)
            continue
        if not is_torch_loss(loss) and crosses_rows(loss, outputs[:1], targets[:1]):
            raise ParamError(
                f"Param loss compares outputs of shape (N, 1) with the labels of column {name!r}, of shape (N,), which "
                "torch broadcasts to (N, N). Give both one shape, as loss(outputs.squeeze(1), labels) does."
            )
        return dtype
    raise DataError(
        f"The model's outputs or the labels of column {name!r} do not fit the loss: labels of shape {labels.shape} "
        f"and dtype {labels.dtype} with outputs of shape {tuple(outputs.shape)} gave {type(failures[0]).__name__}: "
        f"{failures[0]}"
    ) from failures[0]


def _label_dtypes(
    model: nn.Module, loss: LossFunction, labels: npt.NDArray[np.generic]
) -> tuple[torch.dtype, ...]:
    """Return the dtypes to try for labels: int64 for class labels, even in a column of doubles.

    Arrays of floats are class probabilities.
    """
    if is_class_loss(loss) and (labels.ndim == 1 or not np.issubdtype(labels.dtype, np.floating)):
        return (torch.int64,)
    if is_torch_loss(loss) or np.issubdtype(labels.dtype, np.floating):
        return number_dtype(model), torch.int64
    return torch.int64, number_dtype(model)
