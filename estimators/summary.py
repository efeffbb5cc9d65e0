"""The summary of a model's fit, as numbers, as a printed table, and as HTML for notebooks."""

from __future__ import annotations

import html
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParamError, count_of
from sparkdl.foreign_errors import how_to_install
from sparkdl.training.history import RankSeconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from sparkdl.training.history import EpochRecord

_NO_SECONDS = RankSeconds(reading=0.0, communicating=0.0, computing=0.0)


class ShownAsText:
    """An object that a notebook and a prompt show as ``print`` does."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the text for IPython; see https://ipython.readthedocs.io/en/stable/config/integrating.html."""
        return f"<pre>{html.escape(str(self))}</pre>"


def plots() -> Any:
    """Return the module that draws.

    Raises:
        ImportError: if matplotlib (the extra ``plot``) is not installed.
    """
    try:
        return import_module("sparkdl.estimators.summary_plot")
    except ImportError as error:
        raise ImportError(
            f"plot() needs matplotlib: {error}. {how_to_install('plot', 'matplotlib')}"
        ) from error


def html_table(rows: Sequence[Sequence[str]], *, most: int = 20, marked: int | None = None) -> str:
    """Return an HTML table of numbers.

    Args:
        rows: the cells by row, the heads first.
        most: number of the last rows that are shown if there are more.
        marked: index of a row in bold type, counted without the heads; None for no such row.
    """
    bold = (0, None if marked is None else marked + 1)
    heads, *cells = (_cells(row, "th" if index in bold else "td") for index, row in enumerate(rows))
    skipped = [f"<tr><td>{len(cells) - most} earlier</td></tr>"] if len(cells) > most else []
    return f"<table>{heads}{''.join([*skipped, *cells[-most:]])}</table>"


def html_facts(facts: Mapping[str, str]) -> str:
    """Return an HTML table with a row per fact."""
    style = 'style="text-align: left; padding: 1px 8px"'
    rows = (
        f"<tr><th {style}>{html.escape(name)}</th><td {style}>{html.escape(text)}</td></tr>"
        for name, text in facts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _cells(row: Sequence[str], cell: str) -> str:
    parts = (
        f'<{cell} style="text-align: right; padding: 1px 8px">{html.escape(text)}</{cell}>' for text in row
    )
    return f"<tr>{''.join(parts)}</tr>"


class History(tuple["EpochRecord", ...]):
    """The records of a fit, one per epoch; a notebook shows them as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(_columns(rows_of_epochs(self))) if self else "()"

    def _repr_html_(self) -> str:
        return html_table(rows_of_epochs(self)) if self else "<p>No history: the model was not fitted.</p>"


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingSummary:
    """Summary of a model's fit. ``print`` and notebooks show it as a table.

    Attributes:
        history: one record per epoch: loss, metrics, rows, seconds, and how each rank spent its time.
        model_epoch: number of the epoch that the model's weights are from: the best one if bestMetric was set, else
            the last one; None without history.
        run_id: ID of the MLflow run; None if the fit was not tracked.
        model_uri: URI of the model in MLflow; None if the fit was not tracked or MLflow did not accept the model.
        num_parameters: number of the model's parameters; 0 if it is not known.
        num_trained_parameters: number of those that the fit trained.
    """

    history: tuple[EpochRecord, ...] = ()
    model_epoch: int | None = None
    run_id: str | None = None
    model_uri: str | None = None
    num_parameters: int = 0
    num_trained_parameters: int = 0

    @property
    def model_record(self) -> EpochRecord | None:
        """Record of the epoch that the model's weights are from; None for a model without history."""
        records = (record for record in self.history if record.epoch == self.model_epoch)
        return next(records, self.history[-1] if self.history else None)

    @property
    def seconds(self) -> float:
        """Total seconds of all epochs, without validation."""
        return sum(record.seconds for record in self.history)

    @property
    def validation_s(self) -> float:
        """Total seconds of validation in all epochs."""
        return sum(record.validation_s or 0.0 for record in self.history)

    @property
    def rows_per_s(self) -> float:
        """Training rows per second of all ranks together, over all epochs; 0 for a model without history."""
        return sum(record.rows for record in self.history) / self.seconds if self.seconds else 0.0

    @property
    def rank_seconds(self) -> tuple[RankSeconds, ...]:
        """How each rank spent its time, over the epochs that it took part in."""
        # After a restart there may be fewer ranks, or more.
        ranks = zip_longest(*(record.rank_seconds for record in self.history), fillvalue=_NO_SECONDS)
        return tuple(
            RankSeconds(
                reading=sum(spent.reading for spent in epochs),
                communicating=sum(spent.communicating for spent in epochs),
                computing=sum(spent.computing for spent in epochs),
            )
            for epochs in ranks
        )

    def plot(self) -> Figure:
        """Return a matplotlib figure of losses, metrics, learning rate and the use of time over the epochs.

        A notebook displays the figure; elsewhere use ``plot().savefig("fit.png")``.

        Raises:
            ImportError: if matplotlib (the extra ``plot``) is not installed.
            ParamError: if the summary has no epochs.
        """
        if not self.history:
            raise ParamError("There is nothing to draw: this model has no history. Fit one.")
        figure: Figure = plots().plot_history(self.history, self.model_epoch)
        return figure

    def __str__(self) -> str:
        """Return a text with a row per epoch, and a row per rank with the shares of its time."""
        if not self.history:
            return "No history: the model was not fitted."
        return "\n".join(
            [self._head(), "", *_columns(rows_of_epochs(self.history)), "", *_columns(_ranks(self))]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.history:
            return f"<p>{self}</p>"
        marked = None if self.model_epoch is None else self.model_epoch - self.history[0].epoch
        run = "" if self.run_id is None else f"<p>MLflow run <code>{html.escape(self.run_id)}</code></p>"
        return (
            f"<p>{html.escape(self._head())}</p>{html_table(rows_of_epochs(self.history), marked=marked)}"
            f"<details><summary>time of the ranks</summary>{html_table(_ranks(self))}</details>{run}"
        )

    def _head(self) -> str:
        seconds = f"{self.seconds:.1f} s"
        if self.validation_s:
            seconds += f" and {self.validation_s:.1f} s of validation"
        origin = f"; the model is from epoch {self.model_epoch}" if self.model_epoch else ""
        if self.num_parameters:
            origin += f"; {self.num_trained_parameters:,} of {self.num_parameters:,} parameters trained"
        return f"{count_of(len(self.history), 'epoch')} in {seconds}, {self.rows_per_s:,.0f} rows/s{origin}"


def describe_values(summary: TrainingSummary) -> str:
    """Return a text with loss and metrics of the model's epoch, and of the last epoch if that is another one."""
    model, last = summary.model_record, summary.history[-1]
    if model is None or model.epoch == last.epoch:
        return _values(last)
    return f"the model is from epoch {model.epoch}: {_values(model)}; the last epoch, {last.epoch}: {_values(last)}"


def _values(record: EpochRecord) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in record.values.items())


def rows_of_epochs(history: Sequence[EpochRecord]) -> list[list[str]]:
    """Return the cells of a table with a row per epoch, after a row of heads."""
    metrics = list(dict.fromkeys(name for record in history for name in record.metrics))
    rows = [["epoch", "loss", *metrics, "learning rate", "rows/s", "s"]]
    for record in history:
        values = [f"{record.metrics[name]:.4f}" if name in record.metrics else "" for name in metrics]
        rows.append(
            [
                str(record.epoch),
                f"{record.loss:.4f}",
                *values,
                f"{record.learning_rate:.3g}",
                f"{record.rows_per_s:,.0f}",
                f"{record.seconds:.2f}",
            ]
        )
    return rows


def _ranks(summary: TrainingSummary) -> list[list[str]]:
    rank_rows = summary.history[-1].rank_rows if summary.history else ()
    rows = [["rank", "reading", "computing", "communicating", "s", *(["rows per step"] if rank_rows else [])]]
    for rank, spent in enumerate(summary.rank_seconds):
        parts = (spent.reading, spent.computing, spent.communicating)
        total = sum(parts)
        shares = [f"{part / total:.0%}" if total else "" for part in parts]
        of_step = [str(rank_rows[rank]) if rank < len(rank_rows) else ""] if rank_rows else []
        rows.append([str(rank), *shares, f"{total:.2f}", *of_step])
    return rows


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
