"""Packs the code that a logged model carries: the modules of sparkdl.

A logged model carries the Python modules of sparkdl in a wheel, so that it can be served where sparkdl is not
installed. The wheel is in the folder ``code`` of the model and is not one of its requirements: MLflow makes one
environment for all models with the same requirements, and another model of the same version may carry other modules.
:mod:`model_loader <sparkdl.tracking.model_loader>` imports from the wheel.

Runs on the *driver*, and where a loaded model is logged again.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl import __version__

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

DISTRIBUTION = "sparkdl-torch"
"""Name of the distribution for pip; on PyPI the name ``sparkdl`` belongs to another project."""

LOADER_MODULE = "sparkdl_model_loader"
"""Module name of the copy of :mod:`sparkdl.tracking.model_loader` in the model; MLflow imports it before sparkdl."""

_LEFT_OUT = frozenset({"bench", "cli", "doctor", "estimators", "jobs", "launch", "runner"})
"""Packages that start and drive trainings, which the code of a model does not need."""

_WRITTEN_AT = (1980, 1, 1, 0, 0, 0)
"""Modification time of all files in the wheel, the earliest that zip allows: the same modules give the same bytes."""


def write_code(folder: Path) -> list[str]:
    """Write the code that is part of every logged model into a local folder, and return the paths of the files.

    The files are a wheel with the modules of the running sparkdl, and the module that imports from the wheel.
    """
    wheel = folder / f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
    wheel.write_bytes(_wheel())
    loader = folder / f"{LOADER_MODULE}.py"
    with resources.as_file(resources.files("sparkdl.tracking") / "model_loader.py") as source:
        shutil.copyfile(source, loader)
    return [str(wheel), str(loader)]


@lru_cache(maxsize=1)
def _wheel() -> bytes:
    """Return a wheel with the modules that a served model may import (PEP 427)."""
    info = f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    files = {
        **dict(_modules(resources.files("sparkdl"), "sparkdl")),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {__version__}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: sparkdl\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        record += f"{name},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    written = BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _WRITTEN_AT)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return written.getvalue()


def _modules(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield path in the wheel and content of each Python file below a folder, which may itself be in a wheel."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        there = f"{path}/{entry.name}"
        if entry.is_file() and entry.name.endswith(".py"):
            yield there, entry.read_bytes()
        elif entry.is_dir() and not (path == "sparkdl" and entry.name in _LEFT_OUT):
            yield from _modules(entry, there)
