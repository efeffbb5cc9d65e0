from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.slow  # each takes half a minute or more; the daily tests of the demo cover the same path
@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom_and_shows_a_picture(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    # The cell that installs sparkdl on Databricks has no effect here.
    notebook.cells = [cell for cell in notebook.cells if "databricks" not in cell.metadata.get("tags", [])]
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
