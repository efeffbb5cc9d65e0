"""Metrics of a pass over rows: accumulated on each rank and combined over all ranks once, at the end.

A metric is a function of ``(outputs, targets)``, a named one that follows from sums over rows, or a metric of
torchmetrics, which keeps states of its own. Ranks exchange sums and states once, at the end of a pass, and each state
is combined as the metric defines. torchmetrics itself uses one collective per state, at a time that each rank chooses.
"""

from __future__ import annotations

import copy
import inspect
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparkdl.checkpoint.values import copy_to_host
from sparkdl.collective.byte_exchange import allgather_bytes
from sparkdl.errors import ParamError, TrainingError, count_of
from sparkdl.foreign_errors import errors_as
from sparkdl.model.named_metrics import LibraryMetric, RowSums

if TYPE_CHECKING:
    import numpy.typing as npt

    from sparkdl.collective import Communicator
    from sparkdl.training.objective import Evaluation


_UPDATES = "number of updates"
"""Key of the number of updates among the states of a metric; no state can have this name."""

_States: TypeAlias = list[dict[str, Any]]
"""States of a metric on several ranks, each by the names of its parts."""

_CLASSIFICATION = "torchmetrics.classification"


def make_state_metric(name: str, metric: Any, device: torch.device) -> StateMetric | None:
    """Return a :class:`StateMetric` for a torchmetrics metric or a factory of one; None for a function of batches.

    Raises:
        ParamError: if a factory fails or makes something other than a metric, or if the metric holds other metrics.
    """
    prepare = metric.arguments if isinstance(metric, LibraryMetric) else None
    if not _is_of_torchmetrics(metric):
        if not is_factory(metric):
            return None
        with errors_as(ParamError, f"Metric {name!r} cannot be made"):
            metric = metric()
        if not _is_of_torchmetrics(metric):
            raise ParamError(
                f"Metric {name!r} is a function without arguments that returned a {type(metric).__name__}. Give a "
                "function of (outputs, targets), or one that makes a metric of torchmetrics."
            )
    # Such as the sum of two metrics, or a metric of several outputs.
    if any(_is_of_torchmetrics(part) for part in metric.modules() if part is not metric):
        raise ParamError(
            f"Metric {name!r} is a {type(metric).__name__}, which consists of other metrics. Their states cannot be "
            "merged over the ranks. Pass each of these metrics separately, under its own name."
        )
    return StateMetric(name, metric, device, prepare)


def is_factory(metric: Callable[..., Any]) -> bool:
    """Whether a callable makes a metric rather than being one: it is a class, or does not take two arguments."""
    if isinstance(metric, type):
        return True
    try:
        signature = inspect.signature(metric)
    except (TypeError, ValueError):  # functions of C have none
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return True
    return False


class StateMetric:
    """A copy of a torchmetrics metric, reset.

    Args:
        name: name of the metric, used in error messages.
        metric: metric of torchmetrics.
        device: device of the model.
        prepare: function that makes the metric's arguments of outputs and labels; None to pass them on, labels of a
            classification metric as integers.
    """

    def __init__(
        self, name: str, metric: Any, device: torch.device, prepare: Callable[..., Any] | None = None
    ) -> None:
        self._name, self._prepare = name, prepare
        self._metric = copy.deepcopy(metric).to(device)
        self._metric.reset()
        # Otherwise compute() gathers the states by torch.distributed, which merge() does here.
        self._metric.sync_on_compute = self._metric._to_sync = False
        self._metric.dist_sync_on_step = False
        self._device = device
        kinds = [kind for kind in type(metric).__mro__ if kind.__module__.startswith(_CLASSIFICATION)]
        self._wants_integers = bool(kinds)
        self._is_binary = any(kind.__name__.startswith("Binary") for kind in kinds)
        self._earlier: _States = []
        """States of ranks that a resumed fit no longer has. Kept apart, as joined states cannot be updated."""

    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Update the metric with a batch; a classification metric gets labels as integers.

        A binary metric takes one score per row: of two class scores it gets the probability of the second class.
        """
        del rows
        if self._prepare is not None:
            outputs, targets = self._prepare(outputs, targets)
        elif isinstance(targets, Tensor):
            if self._wants_integers and targets.is_floating_point():
                targets = targets.long()
            if (
                self._is_binary
                and isinstance(outputs, Tensor)
                and outputs.ndim == targets.ndim + 1
                and outputs.shape[1] == 2
            ):
                outputs = outputs.softmax(dim=1)[:, 1]
        self._metric.update(outputs, targets)

    def states(self) -> _States:
        """Return a copy of this rank's state in host memory, and the states that :meth:`take` has taken."""
        current = {name: getattr(self._metric, name) for name in self._metric._reductions}
        states = [{**current, _UPDATES: self._metric._update_count}, *self._earlier]
        copied: _States = copy_to_host(states, f"the state of the metric {self._name!r}")
        return copied

    def take(self, states: _States) -> None:
        """Continue from states of ranks: later batches update the first one, the others wait for the merge."""
        seen = [state for state in states if state[_UPDATES]]
        if seen:
            self._earlier = seen[1:]
            self._set(seen[:1])

    def _set(self, seen: _States) -> None:
        seen = tree_map_only(Tensor, lambda state: state.to(self._device), seen)
        for name, reduction in self._metric._reductions.items():
            of_ranks = [state[name] for state in seen]
            setattr(self._metric, name, of_ranks[0] if len(of_ranks) == 1 else _join(of_ranks, reduction))
        self._metric._update_count, self._metric._computed = sum(state[_UPDATES] for state in seen), None

    def merge(self, states: _States) -> float:
        """Return the metric computed from the states of all ranks that saw rows; NaN if no rank did.

        Raises:
            TrainingError: if the metric cannot be computed, or is not one number.
        """
        seen = [state for state in states if state[_UPDATES]]
        if not seen:
            return float("nan")
        self._set(seen)
        with errors_as(TrainingError, f"Metric {self._name!r} failed"):
            value = self._metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TrainingError(
                f"Metric {self._name!r} is not one number but {shown}. Choose an average over the classes, or give a "
                "metric for each."
            )
        return float(value)


def _join(states: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    joined: Any = torch.stack(states) if isinstance(states[0], Tensor) else list(chain.from_iterable(states))
    return joined if reduction is None or not len(joined) else reduction(joined)


def _is_of_torchmetrics(value: Any) -> bool:
    library = sys.modules.get("torchmetrics")  # without the import there is no metric of that library
    return library is not None and isinstance(value, library.Metric | library.MetricCollection)


Metric: TypeAlias = Callable[..., Any] | RowSums
"""A function of ``(outputs, targets)`` that returns one value per row or their mean; a metric of torchmetrics, which
is copied; a function without arguments, or a class, that makes such a metric; or sums over rows."""


class MeanMetric:
    """The mean over rows of what a function returns for batches.

    Attributes:
        sums: the sum over the rows and their number, float64, on the device until they are read.
    """

    def __init__(self, name: str, function: Callable[..., Any], device: torch.device) -> None:
        self._name, self._function = name, function
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Add a batch. Where the function returns several values per row, their mean is the value of the row.

        Raises:
            ParamError: if the function returns neither one value nor one per row.
        """
        value = torch.as_tensor(self._function(outputs, targets)).detach().to(self.sums)
        if value.ndim and value.shape[0] != rows:
            raise ParamError(
                f"Metric {self._name!r} returned shape {tuple(value.shape)} for {count_of(rows, 'row')}. "
                "Return one value per row, or their mean."
            )
        self.sums[0] += value * rows if value.ndim == 0 else value.reshape(rows, -1).mean(dim=1).sum()
        self.sums[1] += rows

    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return the mean, from the sums of all ranks."""
        return float(sums[0] / sums[1]) if sums[1] else float("nan")


_Pair: TypeAlias = tuple[Tensor, Tensor]
"""Outputs and targets of a batch."""

_ROWS_AT_ONCE, _MOST_AT_ONCE = 4096, 1 << 16
"""Rows, and numbers in the outputs, that batches have together before they are added to the sums: ten small operations
per metric would take a tenth of the step of a small model."""


class _WaitingBatches:
    """Copies of batches that are not yet added to the sums of the named metrics."""

    def __init__(self) -> None:
        self._batches: list[_Pair] = []
        self._rows = 0

    def add(self, outputs: Tensor, targets: Tensor) -> list[_Pair]:
        """Add a batch. Return the joined batches that wait no longer: none, one or two."""
        complete: list[_Pair] = []
        if self._batches:
            first, labels = self._batches[0]
            if first.shape[1:] != outputs.shape[1:] or labels.shape[1:] != targets.shape[1:]:
                complete = self.take()  # such as sequences of another length
        self._batches.append((outputs.clone(), targets.clone()))
        self._rows += len(outputs)
        if self._rows >= _ROWS_AT_ONCE or self._rows * outputs[0].numel() >= _MOST_AT_ONCE:
            complete += self.take()
        return complete

    def take(self) -> list[_Pair]:
        """Return all batches joined into one, none if there are none."""
        batches, self._batches, self._rows = self._batches, [], 0
        if not batches:
            return []
        outputs, targets = zip(*batches, strict=True)
        return [(torch.cat(outputs), torch.cat(targets))]


class EpochMetrics:
    """All metrics of one pass.

    Args:
        metrics: metrics by name.
        device: device of the model.

    Raises:
        ParamError: if a metric cannot be made.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._names = tuple(metrics)
        self._waiting = _WaitingBatches()
        self._named: dict[str, RowSums] = {}
        self._sums: dict[str, Tensor] = {}
        """Sums over rows, float64, on the device until they are read."""
        self._values: dict[str, Callable[[npt.NDArray[np.float64]], float]] = {}
        """Functions of the sums of all ranks."""
        self._states: dict[str, StateMetric] = {}
        self._running: dict[str, MeanMetric | StateMetric] = {}
        for name, metric in metrics.items():
            if isinstance(metric, RowSums):
                self._named[name], self._values[name] = metric, metric.value
                self._sums[name] = torch.zeros(metric.size, dtype=torch.float64, device=device)
            elif (made := make_state_metric(name, metric, device)) is None:
                self._running[name] = mean = MeanMetric(name, metric, device)
                self._sums[name], self._values[name] = mean.sums, mean.value
            else:
                self._running[name] = self._states[name] = made

    def add(self, evaluation: Evaluation, rows: int) -> None:
        """Update the metrics with the outputs and targets of a batch of ``rows`` rows, at least one.

        Raises:
            TrainingError: if a metric fails; the message names it.
            ParamError: if a function returns neither one value nor one per row.
        """
        if self._named:
            self._count(self._waiting.add(evaluation.outputs.detach(), evaluation.targets))
        for name, metric in self._running.items():
            with errors_as(TrainingError, f"Metric {name!r} failed"), torch.no_grad():
                outputs, targets = tree_map_only(
                    Tensor, Tensor.detach, (evaluation.outputs, evaluation.targets)
                )
                metric.add(outputs, targets, rows)

    def _count(self, batches: list[_Pair]) -> None:
        """Add batches to the sums of the named metrics."""
        for batch in batches:
            for name, metric in self._named.items():
                with errors_as(TrainingError, f"Metric {name!r} failed"):
                    metric.add(self._sums[name], *batch)

    def try_to_compute(self) -> None:
        """Compute the metrics over the batches so far, as at the end of a pass on one rank.

        Raises:
            TrainingError: if a metric fails, chained from its error, or is not one number.
            ParamError: if a named metric does not fit outputs and labels.
        """
        self._count(self._waiting.take())
        for metric in self._states.values():
            metric.merge(metric.states())

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and states of this rank so far, waiting for the device."""
        self._count(self._waiting.take())
        return {
            "sums": {name: sums.cpu().clone() for name, sums in self._sums.items()},
            "states": {name: metric.states() for name, metric in self._states.items()},
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from states that :meth:`state_dict` returned on one or more ranks; other metrics start empty."""
        for name, sums in self._sums.items():
            for earlier in (state["sums"][name] for state in states if name in state["sums"]):
                sums.add_(earlier.to(sums))
        for name, metric in self._states.items():
            metric.take([of_rank for state in states for of_rank in state["states"].get(name, ())])

    def close(self, communicator: Communicator, *further: float) -> tuple[dict[str, float], list[float]]:
        """Return the metrics of all ranks' rows, and the sums over the ranks of further numbers.

        Collective: one allreduce, and one exchange of states if there are metrics of torchmetrics.

        Raises:
            TrainingError: if a metric fails; the message names it.
        """
        self._count(self._waiting.take())
        states = {name: metric.states() for name, metric in self._states.items()}
        summed = [sums.cpu().numpy() for sums in self._sums.values()]
        sums = np.concatenate([further, *summed])
        if communicator.world_size > 1 and len(sums):
            communicator.allreduce(sums, op="sum")
        ends = len(further) + np.cumsum([0, *map(len, summed)])
        values = {
            name: self._values[name](sums[start:stop])
            for name, start, stop in zip(self._sums, ends, ends[1:], strict=False)
        }
        per_rank = [states]
        if communicator.world_size > 1 and states:
            file = io.BytesIO()
            torch.save(states, file)
            per_rank = [
                torch.load(io.BytesIO(content), weights_only=True)
                for content in allgather_bytes(communicator, file.getvalue(), name="states of metrics")
            ]
        for name, metric in self._states.items():
            values[name] = metric.merge([state for states in per_rank for state in states[name]])
        return {name: values[name] for name in self._names}, [float(value) for value in sums[: len(further)]]
