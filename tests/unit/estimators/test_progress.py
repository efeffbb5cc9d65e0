from __future__ import annotations

import io

from sparkdl.estimators.progress import ProgressLine

STEP = {"kind": "step", "epoch": 1, "epochs": 2, "step": 3, "steps": 9, "loss": 0.51234, "rows_per_s": 1234.5}
EPOCH = {"kind": "epoch", "epoch": 1, "epochs": 2, "loss": 0.25, "rows_per_s": 1000.0, "seconds": 2.5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_moves():
    stream = Terminal()
    line = ProgressLine(stream)
    line.update({**STEP, "eta_s": 75.2})
    line.update({**STEP, "step": 4, "eta_s": 8.4})
    line.update(EPOCH)
    line.close()
    first, second, third = stream.getvalue().split("\r")[1:]
    assert first == "epoch 1/2  step 3/9  loss 0.5123  1,234 rows/s  ETA 1 min 15 s"
    assert second.rstrip() == "epoch 1/2  step 4/9  loss 0.5123  1,234 rows/s  ETA 8 s"
    assert third.startswith("epoch 1/2  loss 0.2500  1,000 rows/s  2.5 s")
    assert stream.getvalue().count("\n") == 1


def test_a_file_gets_a_line_per_epoch():
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.update({**STEP, "eta_s": 7300.0})
    line.update(EPOCH)
    line.update({"kind": "something else"})
    line.close()
    assert stream.getvalue() == "epoch 1/2  loss 0.2500  1,000 rows/s  2.5 s\n"


def test_an_interrupted_line_is_ended():
    stream = Terminal()
    line = ProgressLine(stream)
    line.update({**STEP, "eta_s": 7300.0})
    line.close()
    assert stream.getvalue().endswith("ETA 2 h 01 min\n")
