from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import sys
import termios

import pytest

from sparkdl.estimators.fit.progress import BarProgress, FitProgress, JsonProgress, open_progress

STEP = {"kind": "step", "epoch": 1, "epochs": 2, "step": 3, "steps": 9, "loss": 0.51234, "rows_per_s": 1234.5}
EPOCH = {
    "kind": "epoch",
    "epoch": 1,
    "epochs": 2,
    "loss": 0.25,
    "rows": 2500,
    "rows_per_s": 1000.0,
    "seconds": 2.5,
    "data_wait_share": 0.05,
    "learning_rate": 0.1,
    "metrics": {},
    "rank_seconds": (),
    "eta_s": 75.2,
}
LINE = "epoch 1/2  loss 0.2500  1,000 rows/s  2.5 s  5% waiting for data  ETA 1 min 15 s"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(progress, *events):
    for event in events:
        progress.update(event)
    progress.close()
    return progress._stream.getvalue()


def on_terminal(*events):
    return shown(BarProgress(Terminal(), in_notebook=False), *events)


def lines_of(text):
    """What a terminal shows at the end: of each line the last text."""
    return [line.split("\r")[-1].replace("\x1b[K", "") for line in text.split("\n")]


def test_a_terminal_gets_one_bar_with_metrics_and_the_remaining_time_below_the_epochs():
    metrics = {"accuracy": 0.75, "val_loss": 0.51234}
    steps = {**STEP, "eta_s": 75.2}, {**STEP, "epoch": 2, "step": 4, "eta_s": 8.4}
    text = on_terminal(steps[0], {**EPOCH, "metrics": metrics}, steps[1])
    frames = [frame.replace("\x1b[K", "").rstrip("\n") for frame in text.split("\r")]
    assert "epoch 1/2   17%|███▎                |  ETA 1 min 15 s  loss 0.5123  1,234 rows/s" in frames
    assert LINE.replace("  1,000", "  accuracy 0.7500  val_loss 0.5123  1,000") in lines_of(text)
    bar = "ETA 8 s  loss 0.5123  1,234 rows/s  accuracy 0.7500  val_loss 0.5123"
    assert any(frame.startswith("epoch 2/2   72%|") and frame.endswith(bar) for frame in frames)
    assert "ETA 2 h 01 min" in on_terminal({**STEP, "eta_s": 7300.0})


def test_the_bar_stays_at_the_end_with_the_last_values_and_a_phase_alone_does_not():
    progress = BarProgress(Terminal(), in_notebook=False)
    progress.status("Starting {2} ranks")
    assert lines_of(progress._stream.getvalue()) == ["Starting {2} ranks"]
    progress.update({**STEP, "eta_s": None})
    progress.update({**EPOCH, "epoch": 2, "eta_s": 0.0, "metrics": {"a{b": 0.5}})
    progress.status("Logging the model")
    assert lines_of(progress._stream.getvalue())[-1].endswith("Logging the model")
    assert lines_of(shown(progress))[-2:] == [
        "epoch 2/2  100%|████████████████████|  loss 0.2500  a{b 0.5000  2 s",
        "",
    ]
    failed = BarProgress(Terminal(), in_notebook=False)
    failed.status("Starting 2 ranks")
    assert lines_of(shown(failed)) == [""]


def test_a_narrow_terminal_gets_no_line_that_wraps():
    terminal, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(device, "w") as stream:
        progress = BarProgress(stream, in_notebook=False)
        progress.status("a" * 50)
        progress.update({**STEP, "eta_s": 75.2})
        written = b""
        while b"17%" not in written:  # a terminal passes on what is written by and by
            written += os.read(terminal, 4000)
        frames = written.decode(errors="ignore").replace("\x1b[K", "").split("\r")
        assert max(map(len, frames)) <= 40
        assert frames[-1].startswith("epoch 1/2   17%|")
        progress.close()
    os.close(terminal)


def test_lines_of_ranks_stay_above_the_bar():
    progress = BarProgress(Terminal(), in_notebook=False)
    progress.update({**STEP, "eta_s": 8.4})
    progress.log([0, 1, 2, 3], "hello")
    assert lines_of(shown(progress))[0] == "[ranks 0-3] hello"


def test_a_file_gets_a_line_per_epoch_with_its_metrics_and_the_remaining_time():
    assert shown(FitProgress(io.StringIO()), {**STEP, "eta_s": 7.0}, EPOCH, {"kind": "x"}) == f"{LINE}\n"
    metrics = {"right": 0.75, "val_loss": 0.51234}
    line = LINE.replace("0.2500", "0.2500  right 0.7500  val_loss 0.5123").removesuffix("  ETA 1 min 15 s")
    assert shown(FitProgress(io.StringIO()), {**EPOCH, "metrics": metrics, "eta_s": 0.0}) == f"{line}\n"
    hidden = FitProgress(io.StringIO(), is_shown=False)
    hidden.status("a phase")
    hidden.log([1], "printed")
    assert shown(hidden, EPOCH) == "[rank 1] printed\n"


def test_json_has_an_object_per_line_without_numbers_that_json_lacks():
    progress = JsonProgress(io.StringIO())
    progress.status("Starting")
    progress.log([0, 1], "hello")
    progress.print("the end")
    text = shown(
        progress, {**EPOCH, "metrics": {"val_loss": float("nan")}}, {"kind": "system", "metrics": {}}
    )
    objects = [json.loads(line) for line in text.splitlines()]
    assert all(one.pop("time").endswith("+00:00") for one in objects)
    assert objects[:3] == [
        {"event": "status", "text": "Starting"},
        {"event": "log", "ranks": [0, 1], "line": "hello"},
        {"event": "line", "text": "the end"},
    ]
    (epoch,) = objects[3:]
    assert (epoch["event"], epoch["epoch"], epoch["eta_s"]) == ("epoch", 1, 75.2)
    assert epoch["metrics"] == {"val_loss": None}


@pytest.mark.parametrize(("columns", "kind"), [(80, BarProgress), (0, FitProgress)])
def test_a_terminal_with_a_width_has_a_bar(columns, kind, monkeypatch):
    terminal, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(device, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert type(open_progress(is_shown=True)) is kind
        assert type(open_progress(is_shown=True, log_format="json")) is JsonProgress
        assert type(open_progress(is_shown=False)) is FitProgress
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert type(open_progress(is_shown=True)) is FitProgress
    os.close(terminal)
