from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execute import FOLDER, execute, read

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
WITHOUT_FIT = ("03_own_training_function", "04_from_horovod", "12_score_images")


@pytest.mark.slow  # each takes half a minute or more; the daily tests of the demo cover the same path
@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom_and_shows_a_picture(path: Path, tmp_path: Path) -> None:
    notebook = read(path)
    execute(notebook, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_has_its_outputs_with_a_picture_and_the_progress_of_its_fit(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [output.get("data", {}) for output in outputs]
    assert any("image/png" in data for data in shown)
    bars = [data["text/html"] for data in shown if "<progress" in data.get("text/html", "")]
    assert path.stem in WITHOUT_FIT or any('value="1.0000"' in bar and "<table>" in bar for bar in bars)
    content = json.dumps(outputs)
    assert not [word for word in ("/tmp/", "/home/", "/root/", "Traceback") if word in content]
