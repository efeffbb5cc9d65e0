"""Metrics of a pass over rows: accumulated on each rank and combined over all ranks once, at the end.

A metric is a function of ``(outputs, targets)``, or a metric of torchmetrics, which keeps states of its own. This is
the only module that uses torchmetrics. Ranks exchange the states once, at the end of a pass, and each state is combined
as the metric defines. torchmetrics itself uses one collective per state, at a time that each rank chooses for itself.
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
from sparkdl.errors import ParamError, TrainingError
from sparkdl.foreign_errors import errors_as

if TYPE_CHECKING:
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
    return StateMetric(name, metric, device)


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
    """

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:
        self._name = name
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
        if isinstance(targets, Tensor):
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
            setattr(self._metric, name, of_ranks[0] if len(of_ranks) == 1 else _joined(of_ranks, reduction))
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


def _joined(states: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    joined: Any = torch.stack(states) if isinstance(states[0], Tensor) else list(chain.from_iterable(states))
    return joined if reduction is None or not len(joined) else reduction(joined)


def _is_of_torchmetrics(value: Any) -> bool:
    library = sys.modules.get("torchmetrics")  # without the import there is no metric of that library
    return library is not None and isinstance(value, library.Metric | library.MetricCollection)


Metric: TypeAlias = Callable[..., Any]
"""A function of ``(outputs, targets)`` that returns one value per row or their mean; a metric of torchmetrics, which
is copied; or a function without arguments, or a class, that makes such a metric."""


class MeanMetric:
    """The mean over rows of what a function returns for batches.

    Attributes:
        total: sum over the rows, a float64 tensor that stays on the device until it is read.
        rows: number of rows.
    """

    def __init__(self, name: str, function: Metric, device: torch.device) -> None:
        self._name, self._function = name, function
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.rows = 0

    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Add a batch. Where the function returns several values per row, their mean is the value of the row.

        Raises:
            ParamError: if the function returns neither one value nor one per row.
        """
        value = torch.as_tensor(self._function(outputs, targets)).detach().to(self.total)
        if value.ndim and value.shape[0] != rows:
            raise ParamError(
                f"Metric {self._name!r} returned shape {tuple(value.shape)} for {rows} rows. "
                "Return one value per row, or their mean."
            )
        self.total += value * rows if value.ndim == 0 else value.reshape(rows, -1).mean(dim=1).sum()
        self.rows += rows


class EpochMetrics:
    """All metrics of one pass.

    Args:
        metrics: metrics by name.
        device: device of the model.

    Raises:
        ParamError: if a metric cannot be made.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._means: dict[str, MeanMetric] = {}
        self._states: dict[str, StateMetric] = {}
        self._running: dict[str, MeanMetric | StateMetric] = {}
        for name, metric in metrics.items():
            made = make_state_metric(name, metric, device)
            if made is None:
                self._running[name] = self._means[name] = MeanMetric(name, metric, device)
            else:
                self._running[name] = self._states[name] = made

    def add(self, evaluation: Evaluation, rows: int) -> None:
        """Update the metrics with the outputs and targets of a batch of ``rows`` rows, at least one.

        Raises:
            TrainingError: if a metric fails; the message names it.
            ParamError: if a function returns neither one value nor one per row.
        """
        for name, metric in self._running.items():
            with errors_as(TrainingError, f"Metric {name!r} failed"), torch.no_grad():
                outputs, targets = tree_map_only(
                    Tensor, Tensor.detach, (evaluation.outputs, evaluation.targets)
                )
                metric.add(outputs, targets, rows)

    def try_to_compute(self) -> None:
        """Compute the metrics of torchmetrics over the batches so far, as at the end of a pass on one rank.

        Raises:
            TrainingError: if a metric fails, chained from its error, or is not one number.
        """
        for metric in self._states.values():
            metric.merge(metric.states())

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and states of this rank so far, waiting for the device."""
        return {
            "means": {name: [float(mean.total), mean.rows] for name, mean in self._means.items()},
            "states": {name: metric.states() for name, metric in self._states.items()},
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from states that :meth:`state_dict` returned on one or more ranks; other metrics start empty."""
        for name, mean in self._means.items():
            for total, rows in (state["means"][name] for state in states if name in state["means"]):
                mean.total += total
                mean.rows += rows
        for name, metric in self._states.items():
            metric.take([of_rank for state in states for of_rank in state["states"].get(name, ())])

    def close(self, communicator: Communicator, *further: float) -> tuple[dict[str, float], list[float]]:
        """Return the metrics of all ranks' rows, and the sums over the ranks of further numbers.

        Collective: one allreduce, and one exchange of states if there are metrics of torchmetrics.

        Raises:
            TrainingError: if a metric fails; the message names it.
        """
        states = {name: metric.states() for name, metric in self._states.items()}
        means = list(self._means.values())
        sums = np.array([*further, *(float(mean.total) for mean in means), *(mean.rows for mean in means)])
        if communicator.world_size > 1 and len(sums):
            communicator.allreduce(sums, op="sum")
        totals = sums[len(further) :].reshape(2, -1)
        values = {
            name: float(total / rows) if rows else float("nan")
            for name, total, rows in zip(self._means, *totals, strict=True)
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
        return {name: values[name] for name in self._running}, [
            float(value) for value in sums[: len(further)]
        ]
