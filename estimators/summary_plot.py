"""Plots of the history of a fit and of an evaluation, the only module here that needs matplotlib. On the *driver*."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparkdl.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from matplotlib.axes import Axes

    from sparkdl.training.history import EpochRecord

_VAL = "val_"
_PARTS = (("computing", "#4c72b0"), ("communicating", "#dd8452"), ("reading", "#55a868"))


def plot_history(history: Sequence[EpochRecord], model_epoch: int | None = None) -> Figure:
    """Draw losses, metrics, learning rate and use of time over the epochs.

    Args:
        history: records of the epochs, at least one.
        model_epoch: number of the epoch that the model's weights are from; a line marks it if it is not the last one.
    """
    kinds = _kinds_of_metrics(history)
    earlier = None if model_epoch == history[-1].epoch else model_epoch
    num_panels = 3 + len(kinds)
    num_columns = min(3, (num_panels + 1) // 2)
    num_rows = math.ceil(num_panels / num_columns)
    figure = ShownFigure(figsize=(5.5 * num_columns, 3.5 * num_rows), layout="constrained")
    panels = iter(figure.subplots(num_rows, num_columns).flatten())
    _draw_values(next(panels), history, ["loss"], "loss")
    for kind in kinds:
        _draw_values(next(panels), history, kind, ", ".join(kind))
    _draw_rate(next(panels), history)
    _draw_time(next(panels), history)
    for unused in panels:
        unused.set_axis_off()
    for panel in figure.axes[:num_panels]:
        panel.set_xlabel("epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        if earlier is not None:
            panel.axvline(earlier, color="grey", linestyle=":", linewidth=1)
    rows_per_s = sum(record.rows for record in history) / sum(record.seconds for record in history)
    origin = "" if earlier is None else f", model from epoch {earlier} (dotted)"
    figure.suptitle(f"{count_of(len(history), 'epoch')}, {rows_per_s:,.0f} rows/s{origin}")
    return figure


def _kinds_of_metrics(history: Sequence[EpochRecord]) -> list[list[str]]:
    """The metrics in groups that share an axis: shares, whose values are from 0 to 1, and each other one by itself."""
    values: dict[str, list[float]] = {}
    for record in history:
        for name, value in record.metrics.items():
            values.setdefault(name.removeprefix(_VAL), []).append(value)
    values.pop("loss", None)
    shares = [name for name, known in values.items() if not any(value < 0 or value > 1 for value in known)]
    return [*([shares] if shares else []), *([name] for name in values if name not in shares)]


def _draw_values(axes: Axes, history: Sequence[EpochRecord], names: Sequence[str], title: str) -> None:
    epochs = [record.epoch for record in history]
    for number, name in enumerate(names):
        for prefix, style in (("", "-"), (_VAL, "--")):
            values = [record.values.get(prefix + name, math.nan) for record in history]
            if not all(map(math.isnan, values)):
                axes.plot(epochs, values, style, color=f"C{number}", marker=".", label=prefix + name)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_rate(axes: Axes, history: Sequence[EpochRecord]) -> None:
    rates = [record.learning_rate for record in history]
    axes.plot([record.epoch for record in history], rates, marker=".")
    axes.set_ylim(bottom=0)
    axes.set_title("learning rate of each epoch's last update")
    axes.grid(alpha=0.3)


def _draw_time(axes: Axes, history: Sequence[EpochRecord]) -> None:
    """Draw a bar per epoch of how the ranks spent their time, on average, with validation on top."""
    epochs = [record.epoch for record in history]
    bottom = [0.0] * len(history)
    for part, color in _PARTS:
        heights = [
            sum(getattr(rank, part) for rank in record.rank_seconds) / len(record.rank_seconds)
            for record in history
        ]
        if any(heights):
            axes.bar(epochs, heights, bottom=bottom, color=color, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    validation = [record.validation_s or 0.0 for record in history]
    if any(validation):
        axes.bar(epochs, validation, bottom=bottom, color="lightgrey", label="validation")
    axes.set_title("seconds, mean of the ranks")
    axes.legend()


def plot_classes(
    confusion: npt.NDArray[np.int64] | npt.NDArray[np.float64],
    labels: Sequence[object],
    curves: Mapping[tuple[str, str], npt.NDArray[np.float64]],
) -> Figure:
    """Draw a confusion matrix, and curves beside it.

    Args:
        confusion: number of rows by label and prediction.
        labels: labels in the order of the matrix.
        curves: points of each curve, shape ``(points, 2)``, by the names of its axes.
    """
    size = min(12.0, max(4.5, 0.45 * len(labels) + 2))
    figure = ShownFigure(figsize=(size + 1 + 4.5 * len(curves), max(4.5, size)), layout="constrained")
    panels = figure.subplots(1, 1 + len(curves), squeeze=False)[0]
    totals = confusion.sum(axis=1, keepdims=True)
    shares = confusion / np.where(totals > 0, totals, 1)
    axes = panels[0]
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, ax=axes, location="top", label="share of the label's rows", shrink=0.8)
    if len(labels) <= 30:
        axes.set_xticks(range(len(labels)), map(str, labels), rotation=90 if len(labels) > 6 else 0)
        axes.set_yticks(range(len(labels)), map(str, labels))
    if len(labels) <= 15:
        for (row, column), count in np.ndenumerate(confusion):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count:,.6g}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    for panel, ((x_name, y_name), points) in zip(panels[1:], curves.items(), strict=True):
        panel.plot(points[:, 0], points[:, 1])
        panel.set_xlabel(x_name)
        panel.set_ylabel(y_name)
        panel.set_xlim(0, 1)
        panel.set_ylim(0, 1.02)
        panel.grid(alpha=0.3)
    return figure


def plot_bars(
    names: Sequence[str], values: npt.NDArray[np.float64], errors: npt.NDArray[np.float64], title: str
) -> Figure:
    """Draw a horizontal bar for each name, the first one on top, with an error bar."""
    figure = ShownFigure(figsize=(7, 1.2 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(names)), values, xerr=errors, color="#4c72b0", ecolor="#888888")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xlabel(title)
    axes.grid(axis="x", alpha=0.3)
    return figure


def plot_rates(
    rates: npt.NDArray[np.float64], losses: npt.NDArray[np.float64], suggestion: float | None
) -> Figure:
    """Draw the loss by learning rate, with a line at the suggested rate."""
    figure = ShownFigure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(rates, losses)
    axes.set_xscale("log")
    if suggestion is not None:
        axes.axvline(
            suggestion, color="#dd8452", linestyle="--", label=f"the loss falls most at {suggestion:.2g}"
        )
        axes.legend()
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss (moving average)")
    axes.grid(alpha=0.3)
    return figure


class ShownFigure(Figure):
    """A figure that notebooks display without pyplot, which would keep it in memory."""

    def _repr_png_(self) -> bytes:
        """Return the PNG for IPython; see https://ipython.readthedocs.io/en/stable/config/integrating.html."""
        content = io.BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()
