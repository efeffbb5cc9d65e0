"""The progress bar of a notebook, in an IPython kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkdl.estimators.fit.progress import is_in_notebook

nbformat = pytest.importorskip("nbformat", reason="tests on Spark 3.5 have no notebooks")
nbclient = pytest.importorskip("nbclient", reason="likewise")

ROOT = Path(__file__).parents[4]
CELLS = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    "from sparkdl.estimators.fit.progress import ProgressLine\n"
    "from tests.unit.estimators.fit.test_progress import EPOCH, STEP\n"
    "line = ProgressLine()\n"
    "line.status('Starting 2 ranks')",
    "line.update({**STEP, 'eta_s': 8.4})\n"
    "line.update(EPOCH)\n"
    "line.update({**STEP, 'epoch': 2, 'eta_s': 8.4})",
    "line.status('<done>')",
    "line.close()",
    "ProgressLine(is_shown=False).status('nothing')",
)


def test_one_bar_moves_and_epochs_stay_below_it():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    shown = []
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=500)
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
            (bar,) = notebook.cells[0].outputs
            shown.append((bar.output_type, bar.data["text/plain"], bar.data["text/html"]))
    assert {kind for kind, _, _ in shown} == {"display_data"}
    assert [text for _, text, _ in shown] == [
        "Starting 2 ranks",
        "epoch 2/2  step 3/9  loss 0.5123  1,234 rows/s  ETA 8 s",
        "<done>",
        "",
        "",
    ]
    assert shown[0][2] == '<progress style="width: 16em"></progress> <code>Starting 2 ranks</code>'
    assert 'value="0.6667"' in shown[1][2]
    assert "&lt;done&gt;" in shown[2][2]
    (line,) = notebook.cells[1].outputs
    assert (line.name, line.text) == (
        "stdout",
        "epoch 1/2  loss 0.2500  1,000 rows/s  2.5 s  5% waiting for data\n",
    )
    assert notebook.cells[4].outputs == []


def test_a_plain_process_is_no_notebook_even_where_ipython_is_imported():
    import IPython

    assert sys.modules["IPython"] is IPython
    assert not is_in_notebook()
