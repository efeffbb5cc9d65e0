"""A figure of matplotlib that every notebook shows, whether or not it has imported pyplot. On the *driver*."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure that needs no pyplot, which would keep it in memory."""

    def _repr_png_(self) -> bytes:
        """What IPython asks for: https://ipython.readthedocs.io/en/stable/config/integrating.html."""
        content = io.BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()
