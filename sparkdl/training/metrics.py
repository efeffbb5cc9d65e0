"""Metrics of a pass over rows: added up on each rank, put together over all ranks once, at the end. Runs on a *rank*.

A metric is a function of ``(outputs, targets)``, or one of torchmetrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import ParamError, TrainingError
from sparkdl.training.torchmetrics_states import StateMetric, make_state_metric, merge_states

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.training.objective import Evaluation

Metric: TypeAlias = Callable[..., Any]
"""A function of ``(outputs, targets)`` that returns one value per row, or their mean; a metric of torchmetrics, which
is copied; or a function without arguments, or a class, that makes one."""


class _RunningMetric(Protocol):
    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Take in a batch."""


class MeanMetric:
    """The mean over rows of what a function returns for batches.

    Attributes:
        total: sum over the rows, which stays on the device until somebody asks.
        rows: how many rows.
    """

    def __init__(self, name: str, function: Metric, device: torch.device) -> None:
        self._name, self._function = name, function
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.rows = 0

    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Take in a batch; of what has more values per row, as where an output has several, their mean counts.

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
        metrics: by name.
        device: of the model.

    Raises:
        ParamError: if a metric cannot be made.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._means: dict[str, MeanMetric] = {}
        self._states: dict[str, StateMetric] = {}
        self._running: dict[str, _RunningMetric] = {}
        for name, metric in metrics.items():
            made = make_state_metric(name, metric, device)
            if made is None:
                self._running[name] = self._means[name] = MeanMetric(name, metric, device)
            else:
                self._running[name] = self._states[name] = made

    def add(self, evaluation: Evaluation, rows: int) -> None:
        """Take in what the model made of a batch of ``rows`` rows, one at least.

        Raises:
            TrainingError: if a metric fails, naming it.
            ParamError: if it returns what is no metric.
        """
        for name, metric in self._running.items():
            try:
                with torch.no_grad():
                    metric.add(_detached(evaluation.outputs), _detached(evaluation.targets), rows)
            except ParamError:
                raise
            except Exception as error:
                raise TrainingError(f"Metric {name!r} failed: {type(error).__name__}: {error}") from error

    def try_to_compute(self) -> None:
        """Compute the metrics of torchmetrics over what was taken in so far, as at the end of a pass on one rank.

        Raises:
            TrainingError: if a metric fails, from its error, or is not one number.
        """
        for metric in self._states.values():
            metric.merge([metric.pack()])

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has added up so far, waiting for the device."""
        return {
            "means": {name: [float(mean.total), mean.rows] for name, mean in self._means.items()},
            "states": {name: metric.pack() for name, metric in self._states.items()},
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what :meth:`state_dict` returned on one rank or several; metrics that they lack begin anew."""
        for name, mean in self._means.items():
            for total, rows in (state["means"][name] for state in states if name in state["means"]):
                mean.total += total
                mean.rows += rows
        for name, metric in self._states.items():
            metric.take([state["states"][name] for state in states if name in state["states"]])

    def close(self, communicator: Communicator, *further: float) -> tuple[dict[str, float], list[float]]:
        """Return the metrics of all ranks' rows, and the sums over the ranks of further numbers.

        Collective: one sum, and one exchange of states where there are metrics of torchmetrics.

        Raises:
            TrainingError: if a metric fails, naming it.
        """
        packed = {name: metric.pack() for name, metric in self._states.items()}
        means = list(self._means.values())
        sums = np.array([*further, *(float(mean.total) for mean in means), *(mean.rows for mean in means)])
        if communicator.world_size > 1 and len(sums):
            communicator.allreduce(sums, op="sum")
        totals = sums[len(further) :].reshape(2, -1)
        values = {
            name: float(total / rows) if rows else float("nan")
            for name, total, rows in zip(self._means, *totals, strict=True)
        }
        values |= merge_states(self._states, packed, communicator)
        return {name: values[name] for name in self._running}, [float(each) for each in sums[: len(further)]]


def _detached(value: Any) -> Any:
    """The same without a graph, also where a model has several outputs."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {name: _detached(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_detached(each) for each in value)
    return value
