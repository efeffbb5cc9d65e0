"""What is known about the fit of a model. Runs on the *driver*.

A summary as lines for people. Runs on the *driver*.

Draws the history of a fit. The one place of the estimators that needs matplotlib, the extra ``plot``; *driver*.

A figure of matplotlib that every notebook shows, whether or not it has imported pyplot. On the *driver*.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from sparkdl.errors import ParamError
from sparkdl.training.history import RankSeconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from sparkdl.training.history import EpochRecord


_NO_SECONDS = RankSeconds(reading=0.0, communicating=0.0, computing=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """What is known about the fit of a model. ``print`` shows it as a table.

    Attributes:
        history: one record per epoch: loss, metrics, rows, seconds, and how each rank spent them.
        model_epoch: number of the epoch that the model's weights are from: the best one where bestMetric was set, else
            the last one; None where an older version of sparkdl did not note it.
        run_id: MLflow's id of the run; None when the fit was not tracked.
        model_uri: URI of the model in MLflow; None when the fit was not tracked or MLflow did not take the model.
    """

    history: tuple[EpochRecord, ...] = ()
    model_epoch: int | None = None
    run_id: str | None = None
    model_uri: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds of all epochs, without validation."""
        return sum(record.seconds for record in self.history)

    @property
    def validation_s(self) -> float:
        """Seconds of validation in all epochs."""
        return sum(record.validation_s or 0.0 for record in self.history)

    @property
    def rows_per_s(self) -> float:
        """Rows that all ranks together were trained on per second, over all epochs; 0 for a model without history."""
        return sum(record.rows for record in self.history) / self.seconds if self.seconds else 0.0

    @property
    def rank_seconds(self) -> tuple[RankSeconds, ...]:
        """How each rank spent its time over the epochs it took part in; empty where older versions did not tell."""
        # After a restart there may be fewer ranks, or more.
        ranks = zip_longest(*(record.rank_seconds for record in self.history), fillvalue=_NO_SECONDS)
        return tuple(
            RankSeconds(
                reading=sum(each.reading for each in epochs),
                communicating=sum(each.communicating for each in epochs),
                computing=sum(each.computing for each in epochs),
            )
            for epochs in ranks
        )

    def plot(self) -> Figure:
        """Draw losses, metrics, learning rate and the use of time over the epochs, as a figure of matplotlib.

        In a notebook it shows itself; elsewhere use ``plot().savefig("fit.png")``.

        Raises:
            ImportError: if matplotlib, the extra ``plot``, is not installed.
            ParamError: if the summary has no epochs.
        """
        return plot_history(self.history, self.model_epoch)

    def __str__(self) -> str:

        return summary_table(self)


def summary_table(summary: TrainingSummary) -> str:
    """Lines with a row per epoch, and a row per rank that says how it spent its time."""
    if not summary.history:
        return "No history: the model was not fitted by this version of sparkdl."
    seconds = f"{summary.seconds:.1f} s" + (
        f" and {summary.validation_s:.1f} s of validation" if summary.validation_s else ""
    )
    origin = f"; the model is from epoch {summary.model_epoch}" if summary.model_epoch else ""
    lines = [
        f"{len(summary.history)} epochs in {seconds}, {summary.rows_per_s:,.0f} rows/s{origin}",
        "",
        *_columns(_epochs(summary)),
    ]
    if summary.rank_seconds:
        lines += ["", *_columns(_ranks(summary))]
    return "\n".join(lines)


def _epochs(summary: TrainingSummary) -> list[list[str]]:
    metrics = list(dict.fromkeys(name for record in summary.history for name in record.metrics))
    rows = [["epoch", "loss", *metrics, "learning rate", "rows/s", "s"]]
    for record in summary.history:
        rate = "" if record.learning_rate is None else f"{record.learning_rate:.3g}"
        values = [f"{record.metrics[name]:.4f}" if name in record.metrics else "" for name in metrics]
        rows.append(
            [
                str(record.epoch),
                f"{record.loss:.4f}",
                *values,
                rate,
                f"{record.rows_per_s:,.0f}",
                f"{record.seconds:.2f}",
            ]
        )
    return rows


def _ranks(summary: TrainingSummary) -> list[list[str]]:
    rows = [["rank", "reading", "computing", "communicating", "s"]]
    for rank, spent in enumerate(summary.rank_seconds):
        parts = (spent.reading, spent.computing, spent.communicating)
        whole = sum(parts)
        shares = [f"{part / whole:.0%}" if whole else "" for part in parts]
        rows.append([str(rank), *shares, f"{whole:.2f}"])
    return rows


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


_VAL = "val_"
_PARTS = (("computing", "#4c72b0"), ("communicating", "#dd8452"), ("reading", "#55a868"))


def plot_history(history: Sequence[EpochRecord], model_epoch: int | None = None) -> Figure:
    """Draw losses, metrics, learning rate and use of time over the epochs.

    Args:
        history: one record at least.
        model_epoch: the epoch that the model is from; a line is drawn there where it is not the last one.

    Raises:
        ImportError: if matplotlib is not installed.
        ParamError: if there are no epochs.
    """
    if not history:
        raise ParamError("There is nothing to draw: this model has no history. Fit one.")
    try:
        from matplotlib.ticker import MaxNLocator

    except ImportError as error:
        raise ImportError(
            "plot() needs matplotlib, which is not installed here: pip install matplotlib."
        ) from error
    names = dict.fromkeys(name.removeprefix(_VAL) for record in history for name in record.metrics)
    metrics = [name for name in names if name != "loss"]
    num_panels = 3 + bool(metrics)
    figure = ShownFigure(figsize=(5.5 * (num_panels // 2 + num_panels % 2), 7), layout="constrained")
    panels = iter(figure.subplots(2, num_panels // 2 + num_panels % 2).flatten())
    _draw_values(next(panels), history, ["loss"], "loss")
    if metrics:
        _draw_values(next(panels), history, metrics, "metrics")
    _draw_rate(next(panels), history)
    _draw_time(next(panels), history)
    for unused in panels:
        unused.set_axis_off()
    for panel in figure.axes[:num_panels]:
        panel.set_xlabel("epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        if model_epoch is not None and model_epoch != history[-1].epoch:
            panel.axvline(model_epoch, color="grey", linestyle=":", linewidth=1)
    rows_per_s = sum(record.rows for record in history) / sum(record.seconds for record in history)
    origin = f", model from epoch {model_epoch} (dotted)" if _is_earlier(model_epoch, history) else ""
    figure.suptitle(f"{len(history)} epochs, {rows_per_s:,.0f} rows/s{origin}")
    return figure


def _is_earlier(model_epoch: int | None, history: Sequence[EpochRecord]) -> bool:
    return model_epoch is not None and model_epoch != history[-1].epoch


def _draw_values(axes: Axes, history: Sequence[EpochRecord], names: Sequence[str], title: str) -> None:
    epochs = [record.epoch for record in history]
    for number, name in enumerate(names):
        for prefix, style in (("", "-"), (_VAL, "--")):
            values = [_value(record, prefix + name) for record in history]
            if any(value is not None for value in values):
                drawn = [float("nan") if value is None else value for value in values]
                axes.plot(epochs, drawn, style, color=f"C{number}", marker=".", label=prefix + name)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()


def _value(record: EpochRecord, name: str) -> float | None:
    return record.loss if name == "loss" else record.metrics.get(name)


def _draw_rate(axes: Axes, history: Sequence[EpochRecord]) -> None:
    rates = [float("nan") if record.learning_rate is None else record.learning_rate for record in history]
    axes.plot([record.epoch for record in history], rates, marker=".")
    axes.set_ylim(bottom=0)
    axes.set_title("learning rate of each epoch's last update")
    axes.grid(alpha=0.3)


def _draw_time(axes: Axes, history: Sequence[EpochRecord]) -> None:
    """Bars of how the ranks spent each epoch, on average; and validation above."""
    epochs = [record.epoch for record in history]
    bottom = [0.0] * len(history)
    for part, color in _PARTS:
        heights = [
            sum(getattr(rank, part) for rank in record.rank_seconds) / max(1, len(record.rank_seconds))
            for record in history
        ]
        if any(heights):
            axes.bar(epochs, heights, bottom=bottom, color=color, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if not any(bottom):
        axes.bar(epochs, [record.seconds for record in history], color="grey", label="training")
        bottom = [record.seconds for record in history]
    validation = [record.validation_s or 0.0 for record in history]
    if any(validation):
        axes.bar(epochs, validation, bottom=bottom, color="lightgrey", label="validation")
    axes.set_title("seconds, mean of the ranks")
    axes.legend()


class ShownFigure(Figure):
    """A figure that needs no pyplot, which would keep it in memory."""

    def _repr_png_(self) -> bytes:
        """What IPython asks for: https://ipython.readthedocs.io/en/stable/config/integrating.html."""
        content = io.BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()
