"""Runs Petastorm's modules with their own import function, which adds removed names to the libraries they import.

A finder on ``sys.meta_path`` finds ``petastorm`` and its submodules, and nothing else. It executes them with their own
``__builtins__``, whose ``__import__`` returns facades for pyarrow and NumPy. pyarrow, NumPy, pandas, builtins and
``sys.modules`` stay unchanged for all other code. CPython looks ``__import__`` up in the builtins of the running
frame, and takes those from the module's globals; this is documented behaviour of ``exec`` and the same in 3.10 to
3.13.

The facades are pyarrow, NumPy and distutils as Petastorm 0.12.1 expects them: the real modules plus removed names.
They never enter ``sys.modules``. Repairs inside Petastorm's own classes, for what facades cannot provide, are applied
when a module is loaded.

Upstream: https://github.com/uber/petastorm/issues/806, https://github.com/uber/petastorm/issues/613 and
https://github.com/apache/arrow/pull/39112, which removed what Petastorm imports. Versions: Petastorm 0.12.1 and 0.13.1
with pyarrow 15 and later, NumPy 2, or Python 3.12. It can go when a release of Petastorm imports no removed names.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.version import Version

from sparkdl.data.feed.shard_reader import find_petastorm
from sparkdl.data.petastorm import former_parquet
from sparkdl.data.petastorm.schema_names import OLD_NUMPY_TYPES, known_class
from sparkdl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def install() -> None:
    """Make ``import petastorm`` work in this process; calling it again does nothing.

    Raises:
        DataError: if Petastorm is not installed, has an unsupported version, or was already imported without the
            facades.
    """
    if _Finder in sys.meta_path:
        return
    if "petastorm" in sys.modules:
        raise DataError(
            "petastorm was imported before sparkdl could prepare it for the installed pyarrow. Import "
            "sparkdl.data.petastorm.containment and call install() before anything imports petastorm."
        )
    find_petastorm()
    sys.meta_path.insert(0, _Finder)


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
    """Executes a module of Petastorm with its own ``__import__`` and then applies the module's repair, if any."""

    def exec_module(self, module: ModuleType) -> None:
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
    top = name.partition(".")[0]
    if level == 0 and top in FACADES:
        if name not in WITHOUT_ORIGINAL:
            importlib.import_module(name)
        if not fromlist:
            return FACADES[top]
        if name in FACADES:
            return FACADES[name]
    return builtins.__import__(name, globals, locals, fromlist or (), level)


class Facade(ModuleType):
    """A view of a module with names added."""

    def __init__(self, name: str, **added: Any) -> None:
        super().__init__(name)
        self.__dict__.update(added)

    def __getattr__(self, name: str) -> Any:
        original = sys.modules.get(self.__name__)
        if original is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(original, name)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _facade_of, (self.__name__,)  # another process looks up its own facade by name


class _HadoopFileSystem:
    """Stand-in for ``pyarrow.hdfs.HadoopFileSystem``, which Petastorm uses in ``isinstance`` checks."""


def _connect_hdfs(host: str = "default", port: int = 0, user: str | None = None, **_: Any) -> Any:
    """Replacement of ``pyarrow.hdfs.connect``."""
    import fsspec

    return fsspec.filesystem("hdfs", host=host, port=port, user=user)


def _facade_of(name: str) -> Facade:
    return FACADES[name]


_PYARROW = {
    "parquet": Facade(
        "pyarrow.parquet",
        ParquetDataset=former_parquet.FormerParquetDataset,
        ParquetDatasetPiece=former_parquet.ParquetDatasetPiece,
        ParquetPartitions=former_parquet.ParquetPartitions,
        PartitionSet=former_parquet.PartitionSet,
    ),
    "filesystem": Facade("pyarrow.filesystem", LocalFileSystem=former_parquet.LocalFileSystem),
    "hdfs": Facade("pyarrow.hdfs", HadoopFileSystem=_HadoopFileSystem, connect=_connect_hdfs),
}
_DISTUTILS_VERSION = Facade("distutils.version", LooseVersion=Version)

FACADES: dict[str, Facade] = {
    **{facade.__name__: facade for facade in _PYARROW.values()},
    "pyarrow": Facade(
        "pyarrow",
        __path__=[],
        localfs=former_parquet.LOCAL_FILESYSTEM,
        LocalFileSystem=former_parquet.LocalFileSystem,
        **_PYARROW,
    ),
    "numpy": Facade(
        "numpy",
        NaN=np.nan,
        in1d=np.isin,
        **OLD_NUMPY_TYPES,
    ),
    "distutils.version": _DISTUTILS_VERSION,
    "distutils": Facade("distutils", __path__=[], version=_DISTUTILS_VERSION),
}
"""The facades, by the name under which Petastorm imports each module."""

WITHOUT_ORIGINAL = frozenset({"pyarrow.filesystem", "pyarrow.hdfs", "distutils", "distutils.version"})
"""Facades whose original module does not exist in every supported version, so that it must not be imported first."""


def _contain_child_processes(module: ModuleType) -> None:
    """Make the child processes of Petastorm's process pool install the containment before they import Petastorm."""
    original = module.subprocess

    class _Subprocess:
        @staticmethod
        def Popen(args: list[str], **options: Any) -> Any:  # noqa: N802 - the name of subprocess
            interpreter, _, module_name, *rest = args  # python -m MODULE ...
            code = (
                "import runpy; from sparkdl.data.petastorm.containment import install; install(); "
                f"runpy.run_module({module_name!r}, run_name='__main__', alter_sys=True)"
            )
            return original.Popen([interpreter, "-c", code, *rest], **options)

    module.subprocess = _Subprocess  # type: ignore[attr-defined]  # a module of any kind


def _know_old_names(module: ModuleType) -> None:
    """Make ``make_reader`` read what Petastorm pickled with Python 2, NumPy 1 or pyspark before 3.3."""
    unpickler = module.RestrictedUnpickler
    original = unpickler.find_class

    def find_class(self: Any, module_name: str, name: str) -> Any:
        known = known_class(module_name, name)
        return original(self, module_name, name) if known is None else known

    unpickler.find_class = find_class


REPAIRS: dict[str, Callable[[ModuleType], None]] = {
    "petastorm.etl.legacy": _know_old_names,
    "petastorm.workers_pool.exec_in_new_process": _contain_child_processes,
}
"""Functions that repair a module of Petastorm once it is loaded, by the name of the module."""
