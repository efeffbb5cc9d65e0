"""The objective of a fit: from a batch of columns to the model's outputs and their loss.

The user's own training step can replace model, loss and labels; it runs the same way on a *rank* and in the trial
before the fit. Errors that the user's code raises on a rank are raised again with rank, epoch and step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparkdl.collective.error_origin import is_consequence
from sparkdl.errors import DataError, ParamError, SparkdlError, TrainingError, count_of, list_names
from sparkdl.model.heads import output_of_each
from sparkdl.model.inputs import Arrays, dtype_name, to_tensor
from sparkdl.model.losses import LossTerm, compute_loss, match_targets, needs_global_weight, reduction_of
from sparkdl.random_state import random_numbers_apart, rank_seed

if TYPE_CHECKING:
    from sparkdl.training.precision import Precision
    from sparkdl.training.spec import AugmentFunction, TrainingSpec


UserStep: TypeAlias = Callable[[nn.Module, dict[str, Tensor]], Any]
"""Takes the model and a batch of tensors by name; returns the mean loss of the rows, or the loss and the outputs."""


class StepModule(nn.Module):
    """The user's step as a module: the wrapper that averages gradients wraps it, and the step gets the model itself.

    The step may thus call any method of the model, and call the model several times: all of that happens within the
    one forward pass that the wrapper sees.

    Args:
        module: the model.
        step: the user's step, called with the model and a batch.
        count_operations: function that returns the number of collectives so far. The first call compares it to find
            out whether the step calls any, for example in a SyncBatchNorm; None if that has to be assumed.

    Attributes:
        has_collectives: whether the step calls collectives, in which every rank has to take part.
        is_idle: whether a call returns a loss of zero without calling the step.
    """

    def __init__(
        self, module: nn.Module, step: UserStep, count_operations: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.has_collectives, self.is_idle = True, False
        self._step = partial(step)  # a step that is a module has no part in the model
        self._count_operations = count_operations

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return what the step returns."""
        if self.is_idle:
            # It depends on a parameter, because the wrapper takes part in the averages once a gradient is computed.
            return (
                next(parameter for parameter in self.module.parameters() if parameter.requires_grad).sum()
                * 0.0
            )
        if self._count_operations is None:
            return self._step(self.module, batch)
        count, self._count_operations = self._count_operations, None
        before = count()
        returned = self._step(self.module, batch)
        self.has_collectives = count() != before
        return returned


_OF_USERS_CODE = (DataError, ParamError, TrainingError)


class ErrorContext:
    """A context that adds epoch, step and rank to errors raised within it.

    sparkdl's errors about labels, columns and the results of a user's function keep their type. Errors that already
    name a step, consequences of another rank's failure, and a lack of memory are not changed.

    Args:
        what: text that names the work that may fail.
        rank: rank of this process.
        where: text that names the epoch, and the step if there is one.
        batch: batch that is worked on, described in the message; None for no batch.

    Raises:
        TrainingError: chained from the error, with its type and message.
        DataError: if a DataError was raised; likewise ParamError.
    """

    # Not a generator, because two of these contexts are entered in each step.
    __slots__ = ("_batch", "_rank", "_what", "_where")

    def __init__(self, what: str, *, rank: int, where: str, batch: Batch | None = None) -> None:
        self._what, self._rank, self._where, self._batch = what, rank, where, batch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._raise(error)

    def _raise(self, error: BaseException) -> None:
        from sparkdl.torch import collective_errors  # on ranks only: the driver does without the c10d backend

        failed = f"In {self._where} on rank {self._rank} {self._what} failed"
        try:
            # Otherwise torch's error for a failed collective looks like one of the model.
            with collective_errors():
                raise error
        except MemoryError:
            raise
        except SystemExit as found:
            status = "" if found.code is None else repr(found.code)
            failure = TrainingError(f"{failed}: it called sys.exit({status}).{self._describe_batch()}")
            raise failure.at(self._where) from found
        except Exception as found:
            if is_consequence(found):
                raise
            if isinstance(found, SparkdlError):
                if type(found) not in _OF_USERS_CODE or found.position:
                    raise
                named = type(found)(f"In {self._where} on rank {self._rank}: {found}")
                raise named.at(self._where) from found
            message = str(found).rstrip(".")
            failure = TrainingError(f"{failed}: {type(found).__name__}: {message}.{self._describe_batch()}")
            raise failure.at(self._where) from found

    def _describe_batch(self) -> str:
        if self._batch is None:
            return ""
        columns = (
            f"{name} {dtype_name(values.dtype) if isinstance(values, Tensor) else values.dtype} {tuple(values.shape)}"
            for name, values in self._batch.items()
        )
        return f" The batch: {list_names(columns)}."


Batch = Mapping[str, npt.NDArray[np.generic] | Tensor]
"""Columns by name: arrays, or tensors that are already on the device."""


_CPU = torch.device("cpu")
_OF_AUGMENT = 1
"""Part of the seed that separates the random numbers of augment from others of the same position."""


class StepPosition(NamedTuple):
    """A step of one rank.

    Attributes:
        rank: rank of the process.
        epoch: number of the epoch, from 1.
        step: number of the step in the epoch, from 1.
        reader: number of the rank's reader, from 0; ranks that work on the same rows are one reader.
    """

    rank: int
    epoch: int
    step: int
    reader: int

    def text(self, *, of_validation: bool = False) -> str:
        """Return a text that names epoch and step; in the validation each batch is a step."""
        return f"epoch {self.epoch}, step {self.step}{' of the validation' if of_validation else ''}"


@dataclass(frozen=True)
class Evaluation:
    """Outputs and loss of a model for a batch.

    Attributes:
        outputs: outputs of the model, in the precision of the loss; with several heads a dict by label column.
        targets: labels, as the loss compares them with the outputs; with several heads a dict by label column.
        term: the loss, with its graph if gradients are needed.
    """

    outputs: Any
    targets: Any
    term: LossTerm


class Objective:
    """Applies a module to batches and compares its outputs with the labels.

    Args:
        spec: spec of the fit, which names the columns and their dtypes, and holds the losses.
        precision: precision in which the module computes.
        device: device of the module.

    Attributes:
        sums: whether the loss is the sum over the rows, not their mean.
        weight_depends_on_content: whether the weight of a batch depends on more than its number of rows.
        precision: precision in which the module computes.
        draws: whether preparing a batch may draw random numbers of the process; batches must then not be prepared on a
            thread beside the training.
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
        self.weight_depends_on_content = not self.sums and any(
            needs_global_weight(
                loss,
                weighted=spec.weight is not None or head.class_weights is not None,
                label_is_scalar=head.label.shape == (),
            )
            for head, loss in zip(spec.heads, self._losses, strict=False)
        )

    def for_validation(self) -> Objective:
        """Return the objective with the class weights of validation rows."""
        heads = tuple(head.for_validation() for head in self._spec.heads)
        return Objective(replace(self._spec, heads=heads), precision=self.precision, device=self._device)

    def loss_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers of the losses, including buffers of the model that a loss shares."""
        for loss in self._losses:
            if isinstance(loss, nn.Module):
                yield from loss.buffers()

    def num_rows(self, batch: Batch) -> int:
        """Return the number of rows of a batch."""
        return len(next(iter(batch.values())))

    def prepare(
        self, batch: Mapping[str, npt.NDArray[Any]], *, position: StepPosition | None = None
    ) -> Arrays:
        """Return a batch of the feed as arrays of numbers: the model's inputs, labels and weights by name.

        For a batch without rows, whose columns may have any dtype, return one array without rows.

        Args:
            batch: columns as they are in the files.
            position: position of the step that trains on the batch, if the user's ``augment`` is to be applied; None
                to leave it out. The random numbers that ``augment`` draws depend on seed and position alone.

        Raises:
            DataError: if the batch holds values that the model or the loss cannot take.
            ParamError: if ``augment`` returns other names or another number of rows.
        """
        if not self.num_rows(batch):
            return {"rows": np.empty(0, np.float32)}
        spec = self._spec
        arrays = spec.inputs.prepare_batch(batch)
        for head in spec.heads:
            if head.label.name not in arrays:  # a label may be a feature as well
                arrays[head.label.name] = head.encode(batch[head.label.name])
        if spec.weight is not None:
            arrays[spec.weight] = batch[spec.weight]
        if position is not None and spec.augment is not None:
            return self._augment(spec.augment, arrays, position)
        return arrays

    def _augment(self, augment: AugmentFunction, arrays: dict[str, Any], position: StepPosition) -> Arrays:
        num_rows = self.num_rows(arrays)
        with random_numbers_apart(
            _CPU, rank_seed(self._spec.seed, position.reader, position.epoch, position.step, _OF_AUGMENT)
        ):
            changed = augment(dict(arrays))
        if not isinstance(changed, Mapping) or changed.keys() != arrays.keys():
            fault = f"it returned {type(changed).__name__}"
            if isinstance(changed, Mapping):
                names = [name for name in (*arrays, *changed) if (name in arrays) != (name in changed)]
                fault = f"what it returned differs in {list_names(map(str, names))}"
            raise ParamError(
                f"Param augment must return a dict of the arrays that it is given: {list_names(arrays)}; {fault}."
            )
        for name, values in changed.items():
            if len(values) != num_rows:
                raise ParamError(
                    f"Param augment returned {count_of(len(values), 'row')} of {name!r} for {num_rows}. It may change "
                    "values, but must keep the number of rows."
                )
        return changed

    def prepare_all(
        self,
        batches: Generator[dict[str, npt.NDArray[Any]], None, None],
        first: StepPosition,
        *,
        of_validation: bool = False,
    ) -> Generator[Arrays, None, None]:
        """Yield prepared batches; a consumer that stops early has to close the generator.

        Args:
            batches: batches of the feed.
            first: position of the first batch.
            of_validation: whether the batches are for validation; ``augment`` is then not applied.

        Raises:
            TrainingError: if a function of the user's fails; the message names rank, epoch and step.
            DataError: as :meth:`prepare`, with rank, epoch and step; likewise ParamError.
        """
        with closing(batches):
            for index, batch in enumerate(batches):
                position = first._replace(step=first.step + index)
                where = position.text(of_validation=of_validation)
                with ErrorContext("preparing the batch", rank=position.rank, where=where, batch=batch):
                    prepared = self.prepare(batch, position=None if of_validation else position)
                yield prepared

    def evaluate(self, module: nn.Module, batch: Batch) -> Evaluation:
        """Apply the module, wrapped or not and in its current mode, to a prepared batch of at least one row."""
        if self._spec.user_step is not None:
            return self._run_user_step(self._spec.user_step, module, batch)
        with self.precision.computing():
            returned = self._spec.inputs.apply(module, batch, self._device)
        return self.compare(returned, batch)

    def _run_user_step(self, user_step: UserStep, module: nn.Module, batch: Batch) -> Evaluation:
        """Call the user's step with the model. If the step runs inside a :class:`StepModule`, call that module.

        Either module may be wrapped.

        Raises:
            ParamError: if the step returns anything other than a loss, or a loss and outputs.
        """
        spec, device = self._spec, self._device
        tensors = spec.inputs.tensors(batch, device)
        tensors |= {head.label.name: head.label.tensor(batch, device) for head in spec.heads}
        if spec.weight is not None:
            tensors[spec.weight] = to_tensor(batch[spec.weight], torch.float32, device)
        is_step = any(isinstance(part, StepModule) for part in (module, getattr(module, "module", None)))
        step = module if is_step else StepModule(module, user_step)
        with self.precision.computing():
            returned = step(tensors)
        loss, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ParamError(
                "Param trainStep must return the mean loss of the batch as a tensor with one value, or a tuple of that "
                f"and the outputs; it returned {kind}."
            )
        term = LossTerm(mean=loss.reshape(()), weight=float(self.num_rows(batch)))
        # Made again, because the step may have changed its own in place.
        labels = {head.label.name: head.label.tensor(batch, device) for head in spec.heads}
        return Evaluation(outputs, next(iter(labels.values())) if len(labels) == 1 else labels, term)

    def compare(self, returned: Any, batch: Batch) -> Evaluation:
        """Compare what the module returned with the labels of the batch, whose inputs are not used."""
        spec = self._spec
        weights = None
        if spec.weight is not None:
            weights = to_tensor(batch[spec.weight], torch.float32, self._device)
        outputs = output_of_each(returned, [head.label.name for head in spec.heads])
        outputs = {name: self.precision.for_loss(output) for name, output in outputs.items()}
        targets = {
            head.label.name: match_targets(
                loss, outputs[head.label.name], head.label.tensor(batch, self._device)
            )
            for head, loss in zip(spec.heads, self._losses, strict=True)
        }
        term = self._term(outputs, targets, weights)
        if len(spec.heads) > 1:
            return Evaluation(outputs, targets, term)
        return Evaluation(next(iter(outputs.values())), next(iter(targets.values())), term)

    def _term(
        self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], weights: Tensor | None
    ) -> LossTerm:
        terms = [
            compute_loss(loss, output, target, head.row_weights(target, weights))
            for head, loss, output, target in zip(
                self._spec.heads, self._losses, outputs.values(), targets.values(), strict=True
            )
        ]
        if len(terms) == 1 and self._spec.heads[0].weight == 1:
            return terms[0]
        if len({term.weight for term in terms}) > 1:  # the mean over the rows of all ranks cannot be computed
            raise ParamError(
                "The losses of the label columns are means over different numbers: some over the rows, others over "
                "class weights or over labels that are not ignored. Use losses without ignore_index and weight, or a "
                "trainStep."
            )
        means = [head.weight * term.mean for head, term in zip(self._spec.heads, terms, strict=True)]
        return LossTerm(mean=torch.stack([mean.reshape(()) for mean in means]).sum(), weight=terms[0].weight)
