"""A summary of a fit as numbers, as a table and as a figure."""

from __future__ import annotations

import sys

import pytest
from matplotlib.figure import Figure

from sparkdl.errors import ParamError
from sparkdl.estimators import TrainingSummary
from sparkdl.estimators.summary import History, describe_values
from sparkdl.training.history import EpochRecord, RankSeconds


def record(epoch, **changes):
    fields = {
        "epoch": epoch,
        "loss": 1.0 / epoch,
        "rows": 300,
        "seconds": 1.5,
        "rows_per_s": 200.0,
        "data_wait_share": 0.25,
        "learning_rate": 0.1 * epoch,
        "metrics": {"right": 0.5, "val_loss": 0.75, "val_right": 0.25},
        "validation_s": 0.5,
        "rank_seconds": (
            RankSeconds(reading=0.25, communicating=0.25, computing=1.0),
            RankSeconds(reading=0.5, communicating=0.0, computing=0.5),
        ),
    }
    return EpochRecord(**{**fields, **changes})


def test_times_and_throughput_are_added_up_over_the_epochs():
    summary = TrainingSummary(history=(record(1), record(2, seconds=0.5)))
    assert (summary.seconds, summary.validation_s, summary.rows_per_s) == (2.0, 1.0, 300.0)
    assert summary.rank_seconds == (
        RankSeconds(reading=0.5, communicating=0.5, computing=2.0),
        RankSeconds(reading=1.0, communicating=0.0, computing=1.0),
    )


def test_rank_seconds_include_ranks_that_ran_only_some_epochs():
    two = record(1).rank_seconds
    fewer = TrainingSummary(history=(record(1), record(2, rank_seconds=two[:1]))).rank_seconds
    more = TrainingSummary(history=(record(1, rank_seconds=two[:1]), record(2))).rank_seconds
    assert fewer == more == (RankSeconds(reading=0.5, communicating=0.5, computing=2.0), two[1])


def test_a_single_epoch_is_one_epoch():
    assert str(TrainingSummary(history=(record(1),))).startswith("1 epoch in ")


def test_a_summary_is_printed_as_a_table():
    assert str(TrainingSummary(history=(record(1), record(2, metrics={})), model_epoch=1)) == (
        "2 epochs in 3.0 s and 1.0 s of validation, 200 rows/s; the model is from epoch 1\n"
        "\n"
        "epoch    loss   right  val_loss  val_right  learning rate  rows/s     s\n"
        "    1  1.0000  0.5000    0.7500     0.2500            0.1     200  1.50\n"
        "    2  0.5000                                         0.2     200  1.50\n"
        "\n"
        "rank  reading  computing  communicating     s\n"
        "   0      17%        67%            17%  3.00\n"
        "   1      50%        50%             0%  2.00"
    )


def test_summary_of_a_fit_that_follows_the_speed_of_the_ranks_shows_their_last_rows():
    history = (record(1, rank_rows=(32, 32)), record(2, rank_rows=(43, 21)))
    assert str(TrainingSummary(history=history)).endswith(
        "rank  reading  computing  communicating     s  rows per step\n"
        "   0      17%        67%            17%  3.00             43\n"
        "   1      50%        50%             0%  2.00             21"
    )


def test_values_of_the_models_epoch_are_described_before_those_of_the_last():
    history = (record(1, metrics={"val_x": 0.75}), record(2, metrics={"val_x": 0.5}))
    best = TrainingSummary(history=history, model_epoch=1)
    assert best.model_record is history[0]
    assert describe_values(best) == (
        "the model is from epoch 1: loss 1, val_x 0.75; the last epoch, 2: loss 0.5, val_x 0.5"
    )
    assert describe_values(TrainingSummary(history=history, model_epoch=2)) == "loss 0.5, val_x 0.5"
    assert TrainingSummary(history=history).model_record is history[1]
    assert TrainingSummary().model_record is None


def test_notebooks_show_summary_and_history_as_tables_with_the_models_epoch_in_bold():
    summary = TrainingSummary(
        history=(record(1), record(2, metrics={"<x>": 1.0})), model_epoch=2, run_id="<run>"
    )
    shown = summary._repr_html_()
    assert shown.startswith(
        "<p>2 epochs in 3.0 s and 1.0 s of validation, 200 rows/s; the model is from epoch 2</p>"
    )
    first, second = (line for line in shown.split("<tr>") if ">0.5000<" in line and "%" not in line)
    assert "<th" not in first
    assert "<td" not in second
    assert "&lt;x&gt;" in shown
    assert "&lt;run&gt;" in shown
    assert "17%" in shown
    history = History(record(epoch) for epoch in range(1, 101))
    assert history._repr_html_().count("<tr>") == 22
    assert "80 earlier" in history._repr_html_()
    assert history[2] == record(3)
    assert History()._repr_html_() == TrainingSummary()._repr_html_()


def drawn_lines(panel):
    return {line.get_label(): list(line.get_ydata()) for line in panel.lines if line.get_label()[0] != "_"}


def test_a_plot_has_losses_metrics_rate_and_the_use_of_time():
    figure = TrainingSummary(history=(record(1), record(2), record(3)), model_epoch=2).plot()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG"), "what a notebook asks for"
    loss, metrics, rate, time = figure.axes
    assert drawn_lines(loss) == {"loss": [1.0, 0.5, 1 / 3], "val_loss": [0.75] * 3}
    assert drawn_lines(metrics) == {"right": [0.5] * 3, "val_right": [0.25] * 3}
    assert list(rate.lines[0].get_ydata()) == pytest.approx([0.1, 0.2, 0.3])
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in time.containers}
    assert heights == {
        "computing": [0.75] * 3,
        "communicating": [0.125] * 3,
        "reading": [0.375] * 3,
        "validation": [0.5] * 3,
    }
    assert [bar.get_y() for bar in time.containers[3]] == [1.25] * 3
    assert all(panel.lines[-1].get_xdata() == [2, 2] for panel in (loss, metrics, rate, time))
    assert figure.get_suptitle() == "3 epochs, 200 rows/s, model from epoch 2 (dotted)"


def test_a_plot_has_an_axis_for_all_shares_and_one_for_each_other_metric():
    metrics = {"rmse": 20.0, "accuracy": 0.75, "val_rmse": 30.0, "val_auroc": 0.5, "r2": -1.0}
    figure = TrainingSummary(history=(record(1, metrics=metrics),)).plot()
    titles = [panel.get_title() for panel in figure.axes]
    assert titles[:4] == ["loss", "accuracy, auroc", "rmse", "r2"]
    assert drawn_lines(figure.axes[1]) == {"accuracy": [0.75], "val_auroc": [0.5]}


def test_a_plot_without_metrics_and_validation_leaves_their_place_empty(tmp_path):
    figure = TrainingSummary(history=(record(1, metrics={}, validation_s=None),)).plot()
    loss, _, time, unused = figure.axes
    assert drawn_lines(loss) == {"loss": [1.0]}
    assert [bars.get_label() for bars in time.containers] == ["computing", "communicating", "reading"]
    assert not unused.axison
    figure.savefig(tmp_path / "fit.png")


def test_plot_without_history_or_matplotlib_says_why(monkeypatch):
    with pytest.raises(ParamError, match="this model has no history"):
        TrainingSummary().plot()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "sparkdl.estimators.summary_plot", raising=False)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib: .* pip install matplotlib"):
        TrainingSummary(history=(record(1),)).plot()
