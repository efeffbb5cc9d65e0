"""What the ranks run: a script, whose source is sent so that executors do not need the file, or a function.

:func:`read_script` and :class:`PackedCall` run on the *driver*, the call of a :class:`Script` on a *rank*.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import cloudpickle

from sparkdl.errors import ParamError
from sparkdl.launch.wire.messages import pickle_call


@dataclass(frozen=True, kw_only=True)
class Script:
    """A Python file and its command line.

    Attributes:
        path: path of the file on the driver.
        source: content of the file.
        arguments: elements of ``sys.argv`` after the path.
    """

    path: str
    source: bytes = field(repr=False)
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Run it as ``__main__``, like ``python path arguments``; ``sys.exit()`` and ``sys.exit(0)`` end it normally.

        Raises:
            SystemExit: if it exits with anything else.
        """
        sys.argv = [self._path, *self.arguments]
        folders = list(dict.fromkeys((os.path.dirname(self._path), os.path.dirname(self.path))))
        if sys.path[: len(folders)] != folders:  # an elastic run may run it again
            sys.path[:0] = folders
        try:
            runpy.run_path(self._path, run_name="__main__")
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise

    @cached_property
    def _path(self) -> str:
        """The path of the file here: the driver's path if it has the same content, else that of a temporary copy."""
        try:
            if Path(self.path).read_bytes() == self.source:
                return self.path
        except OSError:
            pass  # this is another machine
        folder = tempfile.mkdtemp(prefix="sparkdl-script-", dir=_folder_of_application())
        atexit.register(_remove, folder, os.getpid())  # tracebacks read its lines until then
        path = Path(folder, os.path.basename(self.path))
        path.write_bytes(self.source)
        return str(path)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a forked child of it
        shutil.rmtree(folder, ignore_errors=True)


def _folder_of_application() -> str | None:
    """The folder for files of this application; None if there is none.

    Spark removes the files when the application ends, even those of ranks that were killed.
    """
    folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    return next((folder for folder in folders if os.access(folder, os.W_OK | os.X_OK)), None)


def read_script(path: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Script:
    """Read a script, and convert the arguments to its command line; see :func:`command_line`.

    Raises:
        ParamError: if there is no such file, or it is not a Python file.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).endswith(".py"):
        raise ParamError(f"Ranks run a function or a file *.py given by its path, not {path!r}.")
    absolute = os.path.abspath(path)
    try:
        source = Path(absolute).read_bytes()
    except OSError as error:
        raise ParamError(
            f"The script {absolute} cannot be read: {error.strerror}. It must be on the driver."
        ) from error
    return Script(path=absolute, source=source, arguments=tuple(command_line(args, kwargs)))


def command_line(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Convert the arguments of a call to those of a command line.

    Positional arguments are not changed. ``name=value`` becomes ``--name value`` with the name as it is spelled,
    ``name=True`` becomes ``--name``, a list or tuple ``--name value value``; False and None are left out. A value that
    begins with a dash becomes ``--name=-1``, which no parser mistakes for an option.
    """
    words = [str(arg) for arg in args]
    for name, value in kwargs.items():
        if value is None or value is False:
            continue
        values = [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
        if value is True:
            words.append(f"--{name}")
        elif len(values) == 1 and values[0].startswith("-"):
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *values]
    return words


class PackedCall:
    """A call that is pickled once, on the driver, so that an error names what cannot be pickled.

    Unpickling it returns a function without arguments.

    Args:
        function: function to call on the ranks.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.

    Raises:
        SerializationError: if something cannot be pickled; the message names it.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._payload = pickle_call(function, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._payload,)


def _unpack(payload: bytes) -> Callable[[], Any]:
    function, args, kwargs = cloudpickle.loads(payload)
    return partial(function, *args, **kwargs)
