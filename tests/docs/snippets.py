"""The Python examples of the documentation's pages; those of a page run in one namespace, in their order.

In an example ``...`` as the first argument stands for the settings of an estimator, which a test names ``settings``.
Paths and URLs of examples lead into a folder of the test.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_EXAMPLE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SETTINGS = re.compile(r"\(\s*\.\.\., ")
_PLACES = re.compile(r"(?<=\")(?:s3:/)?/(?=bucket/|data/|shared/|Volumes/)")


def examples_of(page: Path) -> list[tuple[int, str]]:
    """The examples of a page, with the number of the line before each."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start(2)), textwrap.dedent(match[2])) for match in _EXAMPLE.finditer(text)
    ]


def run_examples(
    name: str,
    folder: Path,
    names: Mapping[str, Any],
    changes: Mapping[str, str] | None = None,
    *,
    begin: int = 0,
    end: int | None = None,
    is_afresh: bool = False,
) -> dict[str, Any]:
    """Run the examples of a page and return their namespace.

    Args:
        name: name of the page's file.
        folder: folder for what lies at paths and URLs of the page.
        names: what the page supposes to be there.
        changes: texts of the examples, and what stands in their place here.
        begin: index of the first example that runs.
        end: index of the first example after it that does not run; None to run all.
        is_afresh: whether each example has the names as they are given, whatever earlier ones assigned.
    """
    page = ROOT / ("" if name == "README.md" else "docs") / name
    namespace = {"__name__": f"examples_of_{page.stem}", **names}
    for line, text in examples_of(page)[begin:end]:
        source = _PLACES.sub(f"{folder}/", _SETTINGS.sub("(**settings, ", text))
        for before, after in (changes or {}).items():
            source = source.replace(before, after)
        if is_afresh:
            namespace.update(names)
        # The lines of a traceback are those of the page.
        exec(compile("\n" * line + source, str(page), "exec"), namespace)
    return namespace
