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
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import ParamError, TrainingError

if TYPE_CHECKING:
    from sparkdl.collective import Communicator
    from sparkdl.training.objective import Evaluation


_UPDATES = "number of updates"
"""Key of the number of updates among the states of a metric; no state can have this name."""


def make_state_metric(name: str, metric: Any, device: torch.device) -> StateMetric | None:
    """Return a :class:`StateMetric` for a torchmetrics metric or a factory of one; None for a function of batches.

    Raises:
        ParamError: if a factory fails or makes something other than a metric, or if the metric holds other metrics.
    """
    if not _is_metric(metric) and not _is_collection(metric):
        if not is_factory(metric):
            return None
        try:
            metric = metric()
        except Exception as error:
            raise ParamError(f"Metric {name!r} cannot be made: {type(error).__name__}: {error}") from error
        if not _is_metric(metric) and not _is_collection(metric):
            raise ParamError(
                f"Metric {name!r} is a function without arguments that returned a {type(metric).__name__}. Give a "
                "function of (outputs, targets), or one that makes a metric of torchmetrics."
            )
    if _holds_metrics(metric):
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
        self._earlier: list[dict[str, Any]] = []
        """States of ranks that a resumed fit no longer has. Kept apart, as joined states cannot be updated."""

    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Update the metric with a batch; a classification metric gets labels as integers.

        A binary metric takes one score per row: of two class scores it gets the probability of the second class.
        """
        del rows
        if _wants_integers(self._metric) and isinstance(targets, Tensor) and targets.is_floating_point():
            targets = targets.long()
        if _is_binary(self._metric) and _has_two_scores(outputs, targets):
            outputs = outputs.softmax(dim=1)[:, 1]
        self._metric.update(outputs, targets)

    def pack(self) -> bytes:
        """Return this rank's states, serialized."""
        states = {name: getattr(self._metric, name) for name in self._metric._reductions}
        content = [{**states, _UPDATES: self._metric._update_count}, *self._earlier]
        buffer = io.BytesIO()
        torch.save(_on_cpu(content), buffer)
        return buffer.getvalue()

    def take(self, packed: list[bytes]) -> None:
        """Continue from packed states: later batches update the first rank's state, the others wait for the merge."""
        ranks = self._unpacked(packed)
        if ranks:
            self._earlier = ranks[1:]
            self._set(ranks[:1])

    def _unpacked(self, packed: list[bytes]) -> list[dict[str, Any]]:
        """The states of the ranks that saw rows."""
        contents = (
            torch.load(io.BytesIO(state), map_location=self._device, weights_only=True) for state in packed
        )
        return [rank for content in contents for rank in content if rank[_UPDATES]]

    def _set(self, ranks: list[dict[str, Any]]) -> None:
        for name, reduction in self._metric._reductions.items():
            states = [state[name] for state in ranks]
            setattr(self._metric, name, states[0] if len(states) == 1 else _joined(states, reduction))
        self._metric._update_count, self._metric._computed = sum(state[_UPDATES] for state in ranks), None

    def merge(self, packed: list[bytes]) -> float:
        """Return the metric computed from the states of all ranks that saw rows; NaN if no rank did.

        Raises:
            TrainingError: if the metric cannot be computed, or is not one number.
        """
        ranks = self._unpacked(packed)
        if not ranks:
            return float("nan")
        self._set(ranks)
        try:
            value = self._metric.compute()
        except Exception as error:
            raise TrainingError(f"Metric {self._name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TrainingError(
                f"Metric {self._name!r} is not one number but {shown}. Choose an average over the classes, or give a "
                "metric for each."
            )
        return float(value)


def merge_states(
    metrics: Mapping[str, StateMetric], packed: Mapping[str, bytes], communicator: Communicator
) -> dict[str, float]:
    """Return the metrics computed from the states of all ranks. Collective if there are any metrics.

    Raises:
        TrainingError: as :meth:`StateMetric.merge`.
    """
    if not metrics:
        return {}
    if communicator.world_size == 1:
        return {name: metric.merge([packed[name]]) for name, metric in metrics.items()}
    payload = np.frombuffer(b"".join(packed.values()), np.uint8)
    world_size = communicator.world_size
    sizes = np.empty(world_size * len(metrics), np.int64)
    communicator.allgather(np.array([len(part) for part in packed.values()], np.int64), sizes)
    per_rank = sizes.reshape(world_size, len(metrics))
    everything = np.empty(int(sizes.sum()), np.uint8)
    communicator.allgather(payload, everything, counts=[int(size) for size in per_rank.sum(axis=1)])
    parts = [part.tobytes() for part in np.split(everything, np.cumsum(sizes)[:-1])]
    return {
        name: metric.merge(parts[index :: len(metrics)])
        for index, (name, metric) in enumerate(metrics.items())
    }


def _joined(states: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    joined: Any = torch.stack(states) if isinstance(states[0], Tensor) else list(chain.from_iterable(states))
    return joined if reduction is None or not len(joined) else reduction(joined)


def _is_metric(value: Any) -> bool:
    library = sys.modules.get("torchmetrics")  # without the import there is no metric of that library
    return library is not None and isinstance(value, library.Metric)


def _is_collection(value: Any) -> bool:
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.MetricCollection)


def _holds_metrics(metric: Any) -> bool:
    """Whether a metric is computed from other metrics, such as the sum of two, or a metric of several outputs."""
    return any(_is_metric(part) for part in metric.modules() if part is not metric)


def _wants_integers(metric: Any) -> bool:
    return any(kind.__module__.startswith("torchmetrics.classification") for kind in type(metric).__mro__)


def _is_binary(metric: Any) -> bool:
    return _wants_integers(metric) and any(
        kind.__name__.startswith("Binary") for kind in type(metric).__mro__
    )


def _has_two_scores(outputs: Any, targets: Any) -> bool:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    return outputs.ndim == targets.ndim + 1 and outputs.shape[1] == 2


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: _on_cpu(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_on_cpu(entry) for entry in value]
    return value


Metric: TypeAlias = Callable[..., Any]
"""A function of ``(outputs, targets)`` that returns one value per row or their mean; a metric of torchmetrics, which
is copied; or a function without arguments, or a class, that makes such a metric."""


class _RunningMetric(Protocol):
    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Update the metric with a batch."""


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
        self._running: dict[str, _RunningMetric] = {}
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
            try:
                with torch.no_grad():
                    metric.add(_detached(evaluation.outputs), _detached(evaluation.targets), rows)
            except ParamError:
                raise
            except Exception as error:
                raise TrainingError(f"Metric {name!r} failed: {type(error).__name__}: {error}") from error

    def try_to_compute(self) -> None:
        """Compute the metrics of torchmetrics over the batches so far, as at the end of a pass on one rank.

        Raises:
            TrainingError: if a metric fails, chained from its error, or is not one number.
        """
        for metric in self._states.values():
            metric.merge([metric.pack()])

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and states of this rank so far, waiting for the device."""
        return {
            "means": {name: [float(mean.total), mean.rows] for name, mean in self._means.items()},
            "states": {name: metric.pack() for name, metric in self._states.items()},
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from states that :meth:`state_dict` returned on one or more ranks; other metrics start empty."""
        for name, mean in self._means.items():
            for total, rows in (state["means"][name] for state in states if name in state["means"]):
                mean.total += total
                mean.rows += rows
        for name, metric in self._states.items():
            metric.take([state["states"][name] for state in states if name in state["states"]])

    def close(self, communicator: Communicator, *further: float) -> tuple[dict[str, float], list[float]]:
        """Return the metrics of all ranks' rows, and the sums over the ranks of further numbers.

        Collective: one allreduce, and one exchange of states if there are metrics of torchmetrics.

        Raises:
            TrainingError: if a metric fails; the message names it.
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
        return {name: values[name] for name in self._running}, [
            float(value) for value in sums[: len(further)]
        ]


def _detached(value: Any) -> Any:
    """The value with its tensors detached, also in the mapping or sequence of a model with several outputs."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {name: _detached(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_detached(entry) for entry in value)
    return value
