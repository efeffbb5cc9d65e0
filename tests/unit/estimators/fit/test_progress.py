from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios

from sparkdl.estimators.fit.progress import ProgressLine

STEP = {"kind": "step", "epoch": 1, "epochs": 2, "step": 3, "steps": 9, "loss": 0.51234, "rows_per_s": 1234.5}
EPOCH = {
    "kind": "epoch",
    "epoch": 1,
    "epochs": 2,
    "loss": 0.25,
    "rows_per_s": 1000.0,
    "seconds": 2.5,
    "data_wait_share": 0.05,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream, *events):
    line = ProgressLine(stream)
    for event in events:
        line.update(event)
    line.close()
    return stream.getvalue()


def test_a_terminal_gets_one_line_that_moves_and_is_ended():
    steps = {**STEP, "eta_s": 75.2}, {**STEP, "step": 4, "eta_s": 8.4}
    first, second, third = shown(Terminal(), *steps, EPOCH).split("\r")[1:]
    assert first == "epoch 1/2  step 3/9  loss 0.5123  1,234 rows/s  ETA 1 min 15 s\x1b[K"
    assert second == "epoch 1/2  step 4/9  loss 0.5123  1,234 rows/s  ETA 8 s\x1b[K"
    assert third == "epoch 1/2  loss 0.2500  1,000 rows/s  2.5 s  5% waiting for data\x1b[K\n"
    assert shown(Terminal(), {**STEP, "eta_s": 7300.0}).endswith("ETA 2 h 01 min\x1b[K\n")


def test_a_narrow_terminal_gets_no_line_that_wraps():
    terminal, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(device, "w") as stream:
        ProgressLine(stream).update({**STEP, "eta_s": 75.2})
        assert os.read(terminal, 1000) == b"\repoch 1/2  step 3/9  loss 0.5123  1,234\x1b[K"
    os.close(terminal)


def test_other_lines_replace_the_progress_line():
    stream = Terminal()
    line = ProgressLine(stream)
    line.update({**STEP, "eta_s": 8.4})
    line.print("[rank 1] hello")
    line.close()
    assert stream.getvalue().endswith("ETA 8 s\x1b[K\r[rank 1] hello\x1b[K\n")


def test_a_file_gets_a_line_per_epoch_with_its_metrics():
    line, waiting = "epoch 1/2  loss 0.2500  1,000 rows/s  2.5 s", "5% waiting for data"
    assert (
        shown(io.StringIO(), {**STEP, "eta_s": 7.0}, EPOCH, {"kind": "something else"})
        == f"{line}  {waiting}\n"
    )
    metrics = {"right": 0.75, "val_loss": 0.51234}
    assert (
        shown(io.StringIO(), {**EPOCH, "metrics": metrics})
        == f"{line}  right 0.7500  val_loss 0.5123  {waiting}\n"
    )
