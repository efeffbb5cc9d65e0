"""Python code that goes along with the models that fits log. Runs on the *driver*.

A logged model carries the Python modules of sparkdl in a wheel, so that what serves it has to get sparkdl from nowhere.
The wheel lies in the model's folder ``code`` and is not among its requirements: MLflow makes one environment for all
models with the same requirements, and another model of the same version may carry other modules. :mod:`model_loader
<sparkdl.tracking.model_loader>` imports from it.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import zipfile
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable

DISTRIBUTION = "sparkdl-torch"
"""What pip calls the package; on PyPI the name ``sparkdl`` belongs to another project."""

LOADER_MODULE = "sparkdl_model_loader"
"""Name under which :mod:`sparkdl.tracking.model_loader` lies in the model: MLflow imports it before sparkdl."""

_LEFT_OUT = frozenset({"bench", "cli", "doctor", "estimators", "jobs", "launch", "runner"})
"""Folders of what trains: it needs Spark, or the extension, which the wheel does not have."""

_WRITTEN_AT = (1980, 1, 1, 0, 0, 0)
"""The first time that a zip file can name: the same modules make the same bytes."""

_code: ContextVar[tuple[str, ...]] = ContextVar("code of logged models", default=())


@contextmanager
def models_with_code(paths: Sequence[Path]) -> Iterator[None]:
    """Have the fits of this thread log copies of files and folders with their models, which import from them."""
    token = _code.set(tuple(map(str, paths)))
    try:
        yield
    finally:
        _code.reset(token)


def current_code() -> list[str]:
    """Return the files and folders that go along with a model that is logged now."""
    return list(_code.get())


def write_carried_code(folder: Path) -> list[str]:
    """Write what every logged model carries into a local folder, and return the paths of the files.

    They are the wheel with the modules of the sparkdl that runs here, and the module that imports from it.
    """
    wheel = folder / f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
    wheel.write_bytes(_wheel())
    loader = folder / f"{LOADER_MODULE}.py"
    with resources.as_file(resources.files("sparkdl.tracking") / "model_loader.py") as source:
        shutil.copyfile(source, loader)
    return [str(wheel), str(loader)]


@lru_cache(maxsize=1)
def _wheel() -> bytes:
    """A wheel with the modules that a served model may import, in the format of PEP 427."""
    info = f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    files = {
        **dict(_modules(resources.files("sparkdl"), "sparkdl")),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {__version__}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: sparkdl\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    written = BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _WRITTEN_AT)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return written.getvalue()


def _modules(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """The Python files below a folder by their paths in the wheel; sparkdl itself may be imported from a wheel."""
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        there = f"{path}/{entry.name}"
        if entry.is_file() and entry.name.endswith(".py"):
            yield there, entry.read_bytes()
        elif entry.is_dir() and not (path == "sparkdl" and entry.name in _LEFT_OUT):
            yield from _modules(entry, there)


def _digest(content: bytes) -> str:
    """A hash as RECORD has it."""
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip('=')}"
