"""Runs Petastorm's modules with an import of their own, so that only they see the facades.

A finder on ``sys.meta_path`` answers for ``petastorm`` and its submodules alone. It executes them with a
``__builtins__`` of their own whose ``__import__`` hands out facades for pyarrow and NumPy. pyarrow, NumPy,
pandas, builtins and ``sys.modules`` stay as they are for everybody else. CPython looks ``__import__`` up in
the builtins of the running frame, and takes those from the module's globals; this is documented behaviour of
``exec`` and the same in 3.10 to 3.13.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import TYPE_CHECKING, Any

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

SUPPORTED_RELEASE = "0.12"
"""0.13.1 pins setuptools below what torch needs, and its thread pool loses row groups."""


def install() -> None:
    """Make ``import petastorm`` work in this process; calling it again does nothing.

    Raises:
        DataError: if Petastorm is not installed, has an untried version, or was imported before without the
            facades.
    """
    if _Finder in sys.meta_path:
        return
    if "petastorm" in sys.modules:
        raise DataError(
            "petastorm was imported before sparkdl could prepare it for the installed pyarrow. Import "
            "sparkdl.data.petastorm.containment and call install() before anything imports petastorm."
        )
    _check_release()
    sys.meta_path.insert(0, _Finder)


def _check_release() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("petastorm")
    except PackageNotFoundError as error:
        raise DataError("Reading Parquet needs Petastorm: pip install petastorm==0.12.1") from error
    if not found.startswith(SUPPORTED_RELEASE + "."):
        raise DataError(
            f"petastorm {found} is installed, sparkdl needs 0.12.1: pip install petastorm==0.12.1"
        )


class _Finder:
    """Finds Petastorm's modules and nothing else."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "petastorm" and not name.startswith("petastorm."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Executes a module of Petastorm with its own ``__import__`` and then mends it."""

    def exec_module(self, module: ModuleType) -> None:
        from sparkdl.data.petastorm.repairs import REPAIRS

        code = self.get_code(module.__name__)
        assert code is not None, "a source file has code"
        module.__dict__["__builtins__"] = dict(builtins.__dict__, __import__=_import)
        exec(code, module.__dict__)  # noqa: S102 - this is how a loader runs a module
        repair = REPAIRS.get(module.__name__)
        if repair is not None:
            repair(module)


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,  # noqa: A002 - names of builtins.__import__
    locals: Mapping[str, Any] | None = None,  # noqa: A002 - likewise
    fromlist: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    """``builtins.__import__`` as Petastorm sees it."""
    from sparkdl.data.petastorm.facades import FACADES, WITHOUT_ORIGINAL

    top = name.partition(".")[0]
    if level == 0 and top in FACADES:
        if name not in WITHOUT_ORIGINAL:
            importlib.import_module(name)
        if not fromlist:
            return FACADES[top]
        if name in FACADES:
            return FACADES[name]
    return builtins.__import__(name, globals, locals, fromlist or (), level)
