"""Loads a logged model with the installed sparkdl, or with the sparkdl that the model carries.

A copy of this file is in the folder ``code`` of each logged model, beside a wheel with the Python modules of sparkdl.
MLflow puts that folder on ``sys.path`` and imports the copy, so its top level imports only the standard library.

An installed sparkdl takes precedence over the carried one: a process can import only one package of this name, and only
the installed one can train. A package ``sparkdl`` of another project is not used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGE = "sparkdl"
_FLAVOR = "sparkdl.mlflow"


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> Any:
    """Load the saved model in the folder ``path``, ``data/sparkdl_model`` of the logged model; called by MLflow."""
    if not _is_importable():
        _import_from(Path(path).parents[1] / "code")
    return importlib.import_module(f"{_FLAVOR}.pyfunc")._load_pyfunc(path, model_config)


def _is_importable() -> bool:
    """Return whether ``import sparkdl`` finds the package of this project; does not import it, as it may be another."""
    spec = find_spec(_PACKAGE)
    folders = None if spec is None else spec.submodule_search_locations
    return folders is not None and PathFinder.find_spec(_FLAVOR, list(folders)) is not None


def _import_from(code: Path) -> None:
    """Put the wheel of a model at the head of ``sys.path``.

    Raises:
        ImportError: if the model has no wheel, or a package ``sparkdl`` of another project is already imported.
    """
    imported = sys.modules.get(_PACKAGE)
    if imported is not None:
        raise ImportError(
            f"This model needs the package sparkdl of the distribution sparkdl-torch, and this process has imported "
            f"another project's package of that name from {getattr(imported, '__file__', None)}. Load the model in a "
            "process that has not imported it, or uninstall it: pip uninstall sparkdl"
        )
    wheels = sorted(code.glob("sparkdl_torch-*.whl"))
    if not wheels:
        raise ImportError(
            f"This model needs sparkdl, which is not installed here, and there is no wheel of it in {code}. Install "
            "sparkdl, or log the model again."
        )
    sys.path.insert(0, str(wheels[-1]))
    importlib.invalidate_caches()
