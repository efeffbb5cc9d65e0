"""A bar that moves in the output of a notebook's cell. The one door to IPython; runs on the *driver*."""

from __future__ import annotations

import html
import sys
from typing import Any


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, as of Jupyter or Databricks; a terminal's IPython is none."""
    library = sys.modules.get("IPython")  # a kernel has imported it
    shell = library.get_ipython() if library is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """One output of the cell that runs, which is replaced whenever there is something new to show."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str, share: float | None = None) -> None:
        """Show a text beside a bar.

        Args:
            text: one line.
            share: how much of the bar is filled, from 0 to 1; None where that is not known.
        """
        value = "" if share is None else f' value="{share:.4f}"'
        bar = f'<progress style="width: 16em"{value}></progress>'
        self._put({"text/plain": text, "text/html": f"{bar} <code>{html.escape(text)}</code>"})

    def close(self) -> None:
        """Take the bar away; the lines below it stay."""
        if self._handle is not None:
            self._put({"text/plain": "", "text/html": ""})

    def _put(self, content: dict[str, str]) -> None:
        if self._handle is not None:
            self._handle.update(content, raw=True)
            return
        from IPython.display import display

        self._handle = display(content, raw=True, display_id=True)
