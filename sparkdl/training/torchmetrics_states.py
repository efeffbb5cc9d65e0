"""The metrics of torchmetrics, which keep states of their own. The one door to that library; runs on a *rank*.

Ranks exchange their states once, at the end of a pass, and each state is put together as the metric says. That is
what torchmetrics does by itself, but with a collective for every state, and in every rank's own time.
"""

from __future__ import annotations

import copy
import inspect
import io
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import ParamError, TrainingError

if TYPE_CHECKING:
    from sparkdl.collective import Communicator

_UPDATES = "number of updates"
"""Beside the states, by a name that none of them can have."""


def make_state_metric(name: str, metric: Any, device: torch.device) -> StateMetric | None:
    """Return a metric of torchmetrics as one of this pass; None for a function of ``(outputs, targets)``.

    Raises:
        ParamError: if what is there to make a metric fails, or makes something else; or the metric holds others.
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
            f"Metric {name!r} is a {type(metric).__name__}, which holds other metrics, whose states ranks cannot put "
            "together. Give each of those under a name of its own."
        )
    return StateMetric(name, metric, device)


def is_factory(metric: Callable[..., Any]) -> bool:
    """Whether a callable is a class, or takes no arguments, so that it makes a metric rather than being one."""
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
    """A copy of a metric of torchmetrics, emptied.

    Args:
        name: of the metric.
        metric: of torchmetrics.
        device: of the model.
    """

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:
        self._name = name
        self._metric = copy.deepcopy(metric).to(device)
        self._metric.reset()
        # Otherwise compute() gathers by torch.distributed what is merged here.
        self._metric.sync_on_compute = self._metric._to_sync = False
        self._metric.dist_sync_on_step = False
        self._device = device
        self._earlier: list[dict[str, Any]] = []
        """States of ranks that a fit goes on without. A metric may take joined states to compute, but not to update."""

    def add(self, outputs: Any, targets: Any, rows: int) -> None:
        """Take in a batch; a metric of classification gets labels as integers."""
        del rows
        if _wants_integers(self._metric) and isinstance(targets, Tensor) and targets.is_floating_point():
            targets = targets.long()
        self._metric.update(outputs, targets)

    def pack(self) -> bytes:
        """Return this rank's states."""
        states = {name: getattr(self._metric, name) for name in self._metric._reductions}
        content = [{**states, _UPDATES: self._metric._update_count}, *self._earlier]
        buffer = io.BytesIO()
        torch.save(_on_cpu(content), buffer)
        return buffer.getvalue()

    def take(self, packed: list[bytes]) -> None:
        """Go on with what ranks packed: with the first one's states for its own, and the others' until they merge."""
        ranks = self._unpacked(packed)
        if ranks:
            self._earlier = ranks[1:]
            self._set(ranks[:1])

    def _unpacked(self, packed: list[bytes]) -> list[dict[str, Any]]:
        """The states of those that saw rows."""
        contents = (
            torch.load(io.BytesIO(each), map_location=self._device, weights_only=True) for each in packed
        )
        return [rank for content in contents for rank in content if rank[_UPDATES]]

    def _set(self, ranks: list[dict[str, Any]]) -> None:
        for name, reduction in self._metric._reductions.items():
            states = [each[name] for each in ranks]
            setattr(self._metric, name, states[0] if len(states) == 1 else _joined(states, reduction))
        self._metric._update_count, self._metric._computed = sum(each[_UPDATES] for each in ranks), None

    def merge(self, packed: list[bytes]) -> float:
        """Return the metric over the states of all ranks; of those that saw rows, if any did.

        Raises:
            TrainingError: if it cannot be computed, or is not one number.
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
    """Return the metrics over the states of all ranks. Collective where there are any metrics.

    Raises:
        TrainingError: as :meth:`StateMetric.merge`.
    """
    if not metrics:
        return {}
    if communicator.world_size == 1:
        return {name: metric.merge([packed[name]]) for name, metric in metrics.items()}
    own = np.frombuffer(b"".join(packed.values()), np.uint8)
    world_size = communicator.world_size
    sizes = np.empty(world_size * len(metrics), np.int64)
    communicator.allgather(np.array([len(part) for part in packed.values()], np.int64), sizes)
    per_rank = sizes.reshape(world_size, len(metrics))
    everything = np.empty(int(sizes.sum()), np.uint8)
    communicator.allgather(own, everything, counts=[int(size) for size in per_rank.sum(axis=1)])
    parts = [part.tobytes() for part in np.split(everything, np.cumsum(sizes)[:-1])]
    return {
        name: metric.merge(parts[index :: len(metrics)])
        for index, (name, metric) in enumerate(metrics.items())
    }


def _joined(states: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    joined: Any = torch.stack(states) if isinstance(states[0], Tensor) else list(chain.from_iterable(states))
    return joined if reduction is None or not len(joined) else reduction(joined)


def _is_metric(value: Any) -> bool:
    library = sys.modules.get("torchmetrics")  # nobody has a metric of a library that was not imported
    return library is not None and isinstance(value, library.Metric)


def _is_collection(value: Any) -> bool:
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.MetricCollection)


def _holds_metrics(metric: Any) -> bool:
    """Whether a metric is computed from others, as a sum of two is, or the metric of each of several outputs."""
    return any(_is_metric(part) for part in metric.modules() if part is not metric)


def _wants_integers(metric: Any) -> bool:
    return any(kind.__module__.startswith("torchmetrics.classification") for kind in type(metric).__mro__)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: _on_cpu(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_on_cpu(each) for each in value]
    return value
