"""What is known about the fit of a model. Runs on the *driver*."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from sparkdl.training.history import RankSeconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        from sparkdl.estimators.summary_plot import plot_history

        return plot_history(self.history, self.model_epoch)

    def __str__(self) -> str:
        from sparkdl.estimators.summary_table import summary_table

        return summary_table(self)
