from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


def _case(path: Path) -> object:
    """The first one every day; all of them take some minutes together."""
    marks = () if path.stem == "01_first_fit" else pytest.mark.slow
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", [_case(path) for path in sorted(FOLDER.glob("*.ipynb"))])
def test_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    # What installs sparkdl on Databricks has no meaning here.
    notebook.cells = [cell for cell in notebook.cells if "databricks" not in cell.metadata.get("tags", [])]
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
