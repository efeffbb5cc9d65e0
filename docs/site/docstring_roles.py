"""Extension of griffe: references of docstrings, such as ``:class:`~sparkdl.Runner```, become links.

A reference to something that the site does not document stays as code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|mod|meth|attr|data|exc|obj):`(~?)([\w.]+)`")


class DocstringRoles(griffe.Extension):
    """Rewrites the docstring of each object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the references of an object's docstring, and the double colons before blocks of code."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda found: _link(found, obj), obj.docstring.value)
            obj.docstring.value = re.sub(r"::\n(?=\n)", ":\n", text)


def _link(found: re.Match[str], obj: griffe.Object) -> str:
    name = found[2].strip(".")
    shown = name.rsplit(".", 1)[-1] if found[1] else name
    first, _, rest = name.partition(".")
    try:
        path = ".".join(filter(None, (obj.resolve(first), rest)))
    except griffe.NameResolutionError:
        path = name
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'


def plain_roles(text: str) -> str:
    """Return a text of a docstring with its references as code."""
    return _ROLE.sub(lambda found: f"`{found[2].rsplit('.', 1)[-1] if found[1] else found[2]}`", text)
