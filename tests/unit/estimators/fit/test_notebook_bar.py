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
    "from sparkdl.estimators.fit.progress import open_progress\n"
    "from tests.unit.estimators.fit.test_progress import EPOCH, STEP\n"
    "progress = open_progress(is_shown=True)\n"
    "progress.status('<Starting> 2 ranks')",
    "progress.update({**STEP, 'eta_s': 8.4})\n"
    "progress.update({**EPOCH, 'metrics': {'accuracy': 0.75}})\n"
    "progress.log([0, 1], 'hello')\n"
    "progress.update({**STEP, 'epoch': 2, 'eta_s': 8.4})",
    "progress.update({**EPOCH, 'epoch': 2, 'eta_s': 0.0})\nprogress.status('Logging')",
    "progress.close()",
    "open_progress(is_shown=False).status('nothing')",
)


def test_one_bar_moves_above_a_table_of_the_epochs_and_stays():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    shown = []
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=500)
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
            (bar,) = notebook.cells[0].outputs
            shown.append((bar.output_type, bar.data["text/html"]))
    assert {kind for kind, _ in shown} == {"display_data"}
    started, moved, logging, closed, _ = (text for _, text in shown)
    assert started == '<progress style="width: 16em"></progress> <code>&lt;Starting&gt; 2 ranks</code>'
    assert moved.startswith(
        '<progress style="width: 16em" value="0.6667"></progress> '
        "<code>epoch 2/2  ETA 8 s  loss 0.5123  1,234 rows/s  accuracy 0.7500</code><table>"
    )
    assert (moved.count("<tr>"), closed.count("<tr>")) == (2, 3)
    assert "<code>epoch 2/2  Logging</code>" in logging
    assert 'value="1.0000"></progress> <code>epoch 2/2  loss 0.2500  5 s</code><table>' in closed
    (line,) = notebook.cells[1].outputs
    assert (line.name, line.text) == ("stdout", "[ranks 0, 1] hello\n")
    assert notebook.cells[3].outputs == notebook.cells[4].outputs == []


def test_a_plain_process_is_no_notebook_even_where_ipython_is_imported():
    import IPython

    assert sys.modules["IPython"] is IPython
    assert not is_in_notebook()
