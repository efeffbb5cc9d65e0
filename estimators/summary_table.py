"""A summary as lines for people. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkdl.estimators.summary import TrainingSummary


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
