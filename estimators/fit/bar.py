"""The progress bar of a fit, in a terminal and in a notebook; imported when a fit shows one.

In a notebook the bar is HTML and not a widget of ``tqdm.notebook``: a saved notebook keeps the HTML as it was last
shown, and of a widget only the first text.
"""

from __future__ import annotations

import html
import threading
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable

_CLEAR_TO_END = "\x1b[K"


class FitBar(tqdm):
    """A bar over all steps of a fit, between two texts; before the first step it is a text alone.

    With a local session, Spark draws its own progress bar over the same line of a terminal, whenever a task starts or
    ends and once a minute. The line is therefore cleared at each update.

    Args:
        stream: stream to write to.
        text: first text.
        in_notebook: whether to display the bar in the output of the running cell.
    """

    monitor_interval = 0  # no thread of tqdm that redraws
    _lock = threading.RLock()  # tqdm's own is shared with processes, which a fit does not start

    def __init__(self, stream: TextIO, text: str, *, in_notebook: bool) -> None:
        self._in_notebook = in_notebook
        self._handle: Any = None
        self._after, self._below = "", ""
        # The fit decides whether it shows a bar, and TQDM_DISABLE would leave one that cannot be written to.
        super().__init__(desc=text, file=stream, bar_format="{desc}", dynamic_ncols=True, disable=False)

    def show_text(self, text: str) -> None:
        """Show a text after the bar, or alone before the first step."""
        if self.total is None:
            self.set_description_str(text)
        else:
            self.show_steps(self.n, self.total, self.desc, text)

    def show_steps(self, done: int, total: int, before: str, after: str, below: str = "") -> None:
        """Show that ``done`` of ``total`` steps are done.

        Args:
            done: number of steps.
            total: number of all steps.
            before: text before the bar.
            after: text after the bar.
            below: HTML that a notebook shows below the bar; the earlier one stays if it is empty.
        """
        self.n, self.total, self._after, self._below = done, total, after, below or self._below
        escaped = after.replace("{", "{{").replace("}", "}}")
        self.bar_format = f"{{desc}}  {{percentage:3.0f}}%|{{bar:20}}|  {escaped}"
        self.set_description_str(before)

    def print(self, text: str) -> None:
        """Write a line that stays, above the bar of a terminal."""
        if self._in_notebook:
            print(text, file=self.fp, flush=True)
        else:
            self.write(text, file=self.fp)

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """Return the function that overwrites the line."""

        def overwrite(text: str) -> None:
            file.write(f"\r{text}{_CLEAR_TO_END}")
            file.flush()

        return overwrite

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the bar as it is now, or a text in its place."""
        if not self._in_notebook:
            columns = self.format_dict["ncols"]
            if msg is None and self.total is None and columns:  # tqdm cuts only lines with a bar
                msg = self.desc[: columns - 1]
            return bool(super().display(msg, pos))
        if msg == "":
            return False
        from IPython.display import display

        share = "" if self.total is None else f' value="{self.n / max(1, self.total):.4f}"'
        text = html.escape("  ".join(filter(None, (self.desc, self._after))))
        bar = f'<progress style="width: 16em"{share}></progress> <code>{text}</code>{self._below}'
        content = {"text/plain": str(self), "text/html": bar}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        return True

    def close(self) -> None:
        """Leave the bar as it is; remove a text that stands alone."""
        if self._handle is not None and self.total is None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
        self.leave = self.total is not None and not self._in_notebook
        super().close()
