"""The objective of a fit: from a batch of columns to the model's outputs and their loss.

The user's own training step can replace model, loss and labels; it runs the same way on a *rank* and when it is
tried. Errors that the user's code raises on a rank are raised again with rank, epoch and step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.collective.failure_origin import is_consequence
from sparkdl.errors import DataError, ParamError, SparkdlError, TrainingError
from sparkdl.model.heads import (
    Head,
    LossTerm,
    compute_loss,
    match_targets,
    needs_global_weight,
    output_of_each,
    reduction_of,
)
from sparkdl.model.inputs import Arrays, dtype_name, dtype_named, to_features, to_tensor
from sparkdl.random_state import random_numbers_apart, rank_seed

if TYPE_CHECKING:
    from sparkdl.training.spec import AugmentFunction, TrainingSpec
    from sparkdl.training.update import Precision


UserStep: TypeAlias = Callable[[nn.Module, dict[str, Tensor]], Any]
"""Takes the model and a batch of tensors by name, and returns the mean loss of its rows, or that and the outputs."""


class StepModule(nn.Module):
    """The user's step as a module: what averages gradients wraps it, and the step has the model itself.

    It may then call any method of the model, and the model as often as it likes: whatever it does happens within the
    one forward pass that the wrapper sees.

    Args:
        module: the model.
        step: called with it and a batch.
    """

    def __init__(self, module: nn.Module, step: UserStep) -> None:
        super().__init__()
        self.module = module
        self._step = partial(step)  # a step that is a module has no part in the model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return what the step returns."""
        return self._step(self.module, batch)


def run_user_step(
    spec: TrainingSpec, module: nn.Module, batch: Mapping[str, Any], device: torch.device
) -> tuple[Any, LossTerm]:
    """Return the outputs, None if the step does not return them, and the loss.

    Args:
        spec: of the fit.
        module: the model, or a :class:`StepModule`, which something may wrap.
        batch: prepared.
        device: of the model.

    Raises:
        ParamError: if the step returns something else.
    """
    assert spec.user_step is not None, "called where there is one"
    inputs = {
        each.name: to_features(batch[each.name], dtype_named(each.dtype), device)
        for each in spec.inputs.inputs
    }
    labels = {head.label.name: head.label.tensor(batch, device) for head in spec.heads}
    weight = (
        {} if spec.weight is None else {spec.weight: to_tensor(batch[spec.weight], torch.float32, device)}
    )
    is_step = any(isinstance(each, StepModule) for each in (module, getattr(module, "module", None)))
    step = module if is_step else StepModule(module, spec.user_step)
    returned = step({**inputs, **labels, **weight})
    loss, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ParamError(
            "Param trainStep must return the mean loss of the batch as a tensor with one value, or a tuple of that "
            f"and the outputs; it returned {found}."
        )
    num_rows = len(next(iter(batch.values())))
    return outputs, LossTerm(mean=loss.reshape(()), weight=float(num_rows))


_OF_USERS_CODE = (DataError, ParamError, TrainingError)


class _ErrorContext:
    """See :func:`error_context`. A class, as two of them are entered in each step."""

    __slots__ = ("_batch", "_rank", "_what", "_where")

    def __init__(self, what: str, rank: int, where: str, batch: Batch | None) -> None:
        self._what, self._rank, self._where, self._batch = what, rank, where, batch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._raise(error)

    def _raise(self, error: BaseException) -> None:
        from sparkdl.torch import collective_errors  # on ranks only: the driver does without the c10d backend

        try:
            # Otherwise torch's error for a failed collective looks like one of the model.
            with collective_errors():
                raise error
        except MemoryError:
            raise
        except SystemExit as found:
            status = "" if found.code is None else repr(found.code)
            raise TrainingError(
                f"{self._failed()} failed: it called sys.exit({status}).{self._given()}"
            ) from found
        except Exception as found:
            if is_consequence(found):
                raise
            if isinstance(found, SparkdlError):
                if type(found) not in _OF_USERS_CODE or ", step " in str(found):
                    raise
                raise type(found)(f"In {self._where} on rank {self._rank}: {found}") from found
            message = str(found).rstrip(".")
            raise TrainingError(
                f"{self._failed()} failed: {type(found).__name__}: {message}.{self._given()}"
            ) from found

    def _failed(self) -> str:
        return f"In {self._where} on rank {self._rank} {self._what}"

    def _given(self) -> str:
        if self._batch is None:
            return ""
        columns = (
            f"{name} {dtype_name(values.dtype) if isinstance(values, Tensor) else values.dtype} {tuple(values.shape)}"
            for name, values in self._batch.items()
        )
        return f" The batch: {', '.join(columns)}."


def error_context(
    what: str, *, rank: int, where: str, batch: Batch | None = None
) -> AbstractContextManager[None]:
    """Add epoch, step and rank to errors raised inside.

    Errors of sparkdl about labels, columns and what a user's function returns keep their type. Unchanged are errors
    that name a step already, consequences of another rank's failure, and a lack of memory.

    Args:
        what: the work that may fail.
        rank: of this process.
        where: epoch, and step if it is in one.
        batch: on which it works.

    Raises:
        TrainingError: from the error, whose type and message it repeats.
        DataError: where one was raised; likewise ParamError.
    """
    return _ErrorContext(what, rank, where, batch)


Batch = Mapping[str, npt.NDArray[np.generic] | Tensor]
"""Columns by name: arrays, or tensors that are on the device already."""


_CPU = torch.device("cpu")
_OF_AUGMENT = 1
"""Separates the random numbers of augment from others of the same position."""


class StepPosition(NamedTuple):
    """A step of one rank.

    Attributes:
        rank: of all ranks.
        epoch: counted from 1.
        step: of the epoch, counted from 1.
        reader: the number of the rank among those with rows of their own.
    """

    rank: int
    epoch: int
    step: int
    reader: int

    def text(self, *, of_validation: bool = False) -> str:
        """Name epoch and step, a batch of the validation being one of its steps."""
        return f"epoch {self.epoch}, step {self.step}{' of the validation' if of_validation else ''}"


@dataclass(frozen=True)
class Evaluation:
    """What a model made of a batch.

    Attributes:
        outputs: what the model returned, in the precision of the loss; of a model with several heads by the names of
            their label columns.
        targets: the labels, as the loss compared them; likewise.
        weights: of the rows, ``(rows,)``; None where each counts once.
        term: the loss, with a graph where gradients are wanted.
    """

    outputs: Any
    targets: Any
    weights: Tensor | None
    term: LossTerm


class Objective:
    """Applies a module to batches and compares what comes out with their labels.

    Args:
        spec: names the columns and their dtypes, and holds the losses.
        precision: in which the module computes.
        device: of the module.

    Attributes:
        sums: whether the loss is a sum over the rows, not their mean.
        finds_weight: whether the weight of a batch depends on what is in it, not on the number of its rows alone.
        precision: in which the module computes.
        draws: whether preparing a batch may draw from the process's random numbers, which is then no work for a thread
            beside the training.
    """

    def __init__(self, spec: TrainingSpec, *, precision: Precision, device: torch.device) -> None:
        self._spec = spec
        self._losses = [
            head.loss.to(device) if isinstance(head.loss, nn.Module) else head.loss
            for head in spec.heads
            if head.loss is not None
        ]
        self.precision = precision
        self._device = device
        self.draws = spec.augment is not None
        self.sums = any(reduction_of(loss) == "sum" for loss in self._losses)
        self.finds_weight = not self.sums and any(
            needs_global_weight(
                loss, weighted=spec.weight is not None, label_is_scalar=head.label.shape == ()
            )
            for head, loss in zip(spec.heads, self._losses, strict=False)
        )

    def loss_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers of the losses, those of the model among them where a loss has these too."""
        for loss in self._losses:
            if isinstance(loss, nn.Module):
                yield from loss.buffers()

    def num_rows(self, batch: Batch) -> int:
        """How many rows a batch has."""
        return len(next(iter(batch.values())))

    def prepare(
        self, batch: Mapping[str, npt.NDArray[Any]], *, position: StepPosition | None = None
    ) -> Arrays:
        """Return a batch of the feed as arrays of numbers: the model's inputs, labels and weights by name.

        Of a batch without rows, whose columns may hold anything, it is one array without rows.

        Args:
            batch: columns as they lie in the files.
            position: the step that trains on the batch, if the user's ``augment`` is to be applied. The random numbers
                that it draws depend on the position alone.

        Raises:
            DataError: if it holds what the model or the loss cannot take.
            ParamError: if the user's changes are no such arrays.
        """
        if not self.num_rows(batch):
            return {"rows": np.empty(0, np.float32)}
        spec = self._spec
        arrays = spec.inputs.prepared(batch)
        for head in spec.heads:
            if head.label.name not in arrays:  # a label may be a feature as well
                arrays[head.label.name] = head.label.encoded(batch[head.label.name])
        if spec.weight is not None:
            arrays[spec.weight] = batch[spec.weight]
        if position is not None and spec.augment is not None:
            return self._augmented(spec.augment, arrays, position)
        return arrays

    def _augmented(self, augment: AugmentFunction, arrays: dict[str, Any], position: StepPosition) -> Arrays:
        num_rows = self.num_rows(arrays)
        with random_numbers_apart(
            _CPU, rank_seed(self._spec.seed, position.reader, position.epoch, position.step, _OF_AUGMENT)
        ):
            changed = augment(dict(arrays))
        if not isinstance(changed, Mapping) or changed.keys() != arrays.keys():
            found = ", ".join(map(str, changed)) if isinstance(changed, Mapping) else type(changed).__name__
            raise ParamError(
                f"Param augment must return a dict of the arrays that it is given: {', '.join(arrays)}; it returned "
                f"{found}."
            )
        for name, values in changed.items():
            if len(values) != num_rows:
                raise ParamError(
                    f"Param augment returned {len(values)} rows of {name!r} for {num_rows}. It may change rows, not "
                    "how many there are."
                )
        return changed

    def prepare_all(
        self,
        batches: Generator[dict[str, npt.NDArray[Any]], None, None],
        first: StepPosition,
        *,
        of_validation: bool = False,
    ) -> Generator[Arrays, None, None]:
        """Yield prepared batches; a consumer that stops early closes the generator.

        Args:
            batches: of the feed.
            first: position of the first of them.
            of_validation: whether the model is not to be trained on them, so that nothing changes them.

        Raises:
            TrainingError: with rank, epoch and step, if a function of the user's fails; likewise the errors of
                :meth:`prepare`.
        """
        with closing(batches):
            for index, batch in enumerate(batches):
                position = first._replace(step=first.step + index)
                where = position.text(of_validation=of_validation)
                with error_context("preparing the batch", rank=position.rank, where=where, batch=batch):
                    prepared = self.prepare(batch, position=None if of_validation else position)
                yield prepared

    def evaluate(self, module: nn.Module, batch: Batch) -> Evaluation:
        """Apply the module, wrapped or not and in whichever mode it is, to a prepared batch of one row at least."""
        spec = self._spec
        if spec.user_step is not None:
            with self.precision.computing():
                outputs, term = run_user_step(spec, module, batch, self._device)
            return Evaluation(outputs, self._labels(batch), None, term)
        with self.precision.computing():
            returned = spec.inputs.apply(module, batch, self._device)
        return self.compare(returned, batch)

    def compare(self, returned: Any, batch: Batch) -> Evaluation:
        """Compare what the module returned for a batch with its labels, of which only these and the weights count."""
        spec = self._spec
        weights = None
        if spec.weight is not None:
            weights = to_tensor(batch[spec.weight], torch.float32, self._device)
        outputs = output_of_each(returned, [head.label.name for head in spec.heads])
        outputs = {name: self.precision.for_loss(each) for name, each in outputs.items()}
        targets = {
            head.label.name: self._targets(head, loss, batch, outputs[head.label.name])
            for head, loss in zip(spec.heads, self._losses, strict=True)
        }
        term = self._term(outputs, targets, weights)
        if len(spec.heads) > 1:
            return Evaluation(outputs, targets, weights, term)
        return Evaluation(next(iter(outputs.values())), next(iter(targets.values())), weights, term)

    def _labels(self, batch: Batch) -> Any:
        labels = {head.label.name: head.label.tensor(batch, self._device) for head in self._spec.heads}
        return next(iter(labels.values())) if len(labels) == 1 else labels

    def _targets(self, head: Head, loss: Any, batch: Batch, outputs: Tensor) -> Tensor:
        return match_targets(loss, outputs, head.label.tensor(batch, self._device))

    def _term(
        self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], weights: Tensor | None
    ) -> LossTerm:
        terms = [
            compute_loss(loss, output, target, weights)
            for loss, output, target in zip(self._losses, outputs.values(), targets.values(), strict=True)
        ]
        if len(terms) == 1 and self._spec.heads[0].weight == 1:
            return terms[0]
        check_like_weights(terms)
        means = [head.weight * term.mean for head, term in zip(self._spec.heads, terms, strict=True)]
        return LossTerm(mean=torch.stack([mean.reshape(()) for mean in means]).sum(), weight=terms[0].weight)


def check_like_weights(terms: list[LossTerm]) -> None:
    """Check that the mean losses of several heads were divided by one number.

    Raises:
        ParamError: if they were not, so that no weight makes the means of several ranks that of one.
    """
    if len({term.weight for term in terms}) > 1:
        raise ParamError(
            "The losses of several heads divide by different numbers: by the rows, and by the weights of classes or "
            "the labels that count. Leave ignore_index and weight out of them, or give a trainStep."
        )
