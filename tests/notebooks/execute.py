"""Runs notebooks from top to bottom; as a program, writes their outputs into the committed files.

``python -m tests.notebooks.execute [NAME ...]`` runs those whose file name begins with a name, or all.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


def read(path: Path) -> NotebookNode:
    """Return a notebook without the cells that have an effect only on Databricks."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if not _is_for_databricks(cell)]
    return notebook


def execute(notebook: NotebookNode, folder: str | Path) -> None:
    """Run the cells of a notebook in a folder, which puts the outputs into its cells."""
    NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(folder)}}, record_timing=False
    ).execute()


def write_outputs(path: Path) -> None:
    """Run a notebook, and write the outputs into its file.

    What Spark writes to stderr at its start, and the folder in which the notebook ran, belong to this machine and are
    left out.
    """
    whole, run = nbformat.read(path, as_version=4), read(path)
    with tempfile.TemporaryDirectory() as folder:
        execute(run, folder)
    outputs = {cell.id: cell for cell in run.cells}
    for cell in whole.cells:
        if cell.cell_type == "code" and cell.id in outputs:
            cell.outputs = [
                _committed(output, folder)
                for output in outputs[cell.id].outputs
                if output.get("name") != "stderr"
            ]
            cell.execution_count = outputs[cell.id].execution_count
    nbformat.write(whole, path)


def _is_for_databricks(cell: NotebookNode) -> bool:
    return "databricks" in cell.metadata.get("tags", [])


def _committed(output: NotebookNode, folder: str) -> NotebookNode:
    kept = copy.deepcopy(output)
    kept.pop("transient", None)
    if "text" in kept:
        kept.text = _without_folder(kept.text, folder)
    for kind, content in kept.get("data", {}).items():
        if isinstance(content, str) and kind.startswith("text/"):
            kept.data[kind] = _without_folder(content, folder)
    return kept


def _without_folder(text: str, folder: str) -> str:
    return text.replace(f"{folder}/", "").replace(folder, ".")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[""])
    names = tuple(parser.parse_args().names)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.name.startswith(names):
            print(path.name, flush=True)
            write_outputs(path)
