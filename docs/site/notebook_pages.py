"""Pages of the site that are made from the notebooks, with their outputs."""

from __future__ import annotations

import base64
import html
import itertools
import re
from typing import TYPE_CHECKING, Any

import nbformat

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MOST_LINES = 40


def tutorials_page(notebooks: Iterable[Path]) -> str:
    """Return the page that lists the notebooks by their questions, with the first paragraph of each."""
    entries = []
    for path in notebooks:
        title, text = nbformat.read(path, as_version=4).cells[0].source.split("\n", 1)
        entries.append(f"## [{title.lstrip('# ')}](notebooks/{path.stem}.md)\n\n{text.strip()}\n")
    return (
        "# Tutorials\n\nEach is a notebook that answers one question and runs on a laptop. Their files are in the "
        "folder `notebooks` of the repository.\n\n" + "\n".join(entries)
    )


def page_of_notebook(path: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook and its pictures: contents by their path on the site."""
    files: dict[str, str | bytes] = {}
    parts = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code" and cell.source.strip():
            language = "text" if cell.source.startswith("%") else "python"
            parts.append(f"```{language}\n{cell.source}\n```")
            for index, output in enumerate(_joined(cell.outputs)):
                picture = output.get("data", {}).get("image/png")
                if picture:
                    name = f"{path.stem}_{number}_{index}.png"
                    files[f"notebooks/{name}"] = base64.b64decode(picture)
                    parts.append(f"![output of the cell above]({name})")
                else:
                    parts.append(_text_of(output))
    files[f"notebooks/{path.stem}.md"] = "\n\n".join(part for part in parts if part) + "\n"
    return files


def _joined(outputs: Iterable[Any]) -> list[Any]:
    """Return outputs after joining the texts that the cell printed one after the other."""
    joined: list[Any] = []
    for is_text, group in itertools.groupby(outputs, lambda output: output.output_type == "stream"):
        of_kind = list(group)
        joined += [{"text": "".join(output.text for output in of_kind)}] if is_text else of_kind
    return joined


def _text_of(output: Any) -> str:
    """Return an output as HTML: a table as it is, text without the escapes of terminals and cut where it is long."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{data["text/html"]}\n</div>'
    text = output.get("text") or data.get("text/plain") or "\n".join(output.get("traceback", []))
    lines = [line.rsplit("\r", 1)[-1] for line in _ESCAPES.sub("", text).rstrip().split("\n")]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... {len(lines) - _MOST_LINES} more lines"]
    return f'<pre class="output">{html.escape(chr(10).join(lines))}</pre>' if any(lines) else ""
