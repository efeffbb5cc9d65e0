"""Hooks of mkdocs: pages made from the code, the notebooks as pages, and links that hold on the site.

The pages of ``docs/`` link to files as they lie in the repository, such as ``../README.md`` and
``../notebooks/01_first_fit.ipynb``. On the site these links lead to the pages made from those files.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from notebook_pages import page_of_notebook, tutorials_page
from reference_pages import reference_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# For the extension of griffe; mkdocs itself adds the folder while it imports this file.
sys.path[:0] = [str(ROOT), str(HERE)]

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# The files of the repository outside of docs/ that are pages of the site, by their path in the repository.
PLACES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "versions.md",
    "notebooks": "tutorials.md",
}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCES = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


@event_priority(100)
def on_config(config: MkDocsConfig) -> None:
    """Add the generated pages to the navigation, and the extension that reads docstrings."""
    python = config.plugins["mkdocstrings"].config["handlers"]["python"]
    python["options"]["extensions"] = [str(HERE / "docstring_roles.py")]
    config.extra["pages"] = pages = reference_pages()
    parts = {title: entries for part in config.nav for title, entries in part.items()}
    parts["Tutorials"] += [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]
    for entry in parts["Reference"]:
        for title in entry if isinstance(entry, dict) else ():
            folder = f"reference/{title.lower()}/"
            entry[title] = [path for path in pages if path.startswith(folder)]


@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are made from the code, from notebooks and from files of the top folder."""
    pages: dict[str, str | bytes] = {**config.extra["pages"], "tutorials.md": tutorials_page(NOTEBOOKS)}
    for notebook in NOTEBOOKS:
        pages |= page_of_notebook(notebook)
    for name, place in PLACES.items():
        if name.endswith(".md"):
            pages[place] = _linked((ROOT / name).read_text(), name, place)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page of docs/ with links to the pages that its links lead to on the site."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.generated_by:
        return markdown
    return _linked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _linked(markdown: str, source: str, place: str) -> str:
    """Return a page with links for the site.

    Args:
        markdown: text of the page, with links relative to its file in the repository.
        source: path of its file, relative to the top folder.
        place: its path on the site.
    """
    parts = _FENCES.split(markdown)
    return "".join(
        part if index % 2 else _LINK.sub(lambda found: _link(found, source, place), part)
        for index, part in enumerate(parts)
    )


def _link(found: re.Match[str], source: str, place: str) -> str:
    target, _, anchor = found[2].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    on_site = PLACES.get(path) or path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        on_site = str(Path(path).with_suffix(".md"))
    relative = os.path.relpath(on_site, posixpath.dirname(place) or ".")
    return f"{found[1]}{relative}{'#' if anchor else ''}{anchor}{found[3]}"
