"""The traceback of an exception of the user's code, without the frames of the libraries that run it."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import sparkdl
from sparkdl.errors import count_of

_SPARKDL = str(Path(sparkdl.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen ")


def describe_exception(error: BaseException, *, max_chars: int) -> str:
    """Return the line of the user's code that raised, and below it the traceback.

    Runs of frames of sparkdl, torch and the standard library are folded to a line, except for the innermost frame.

    Args:
        error: the exception; its causes are described, too.
        max_chars: length of the text; the beginning of a longer traceback is left out.
    """
    described = traceback.TracebackException.from_exception(error)
    line = line_of_user(error)
    line = f"{line}\n\n" if line else ""
    for one in _with_causes(described):
        one.stack = _Folded(one.stack)
    text = "".join(described.format())
    return f"{line}{text[-(max_chars - len(line)) :]}"


def line_of_user(error: BaseException) -> str:
    """Return the line of the user's code that raised an exception or its causes; empty if none did.

    It is the innermost frame of the user's own code, or of an installed package if there is no other.
    """
    described = traceback.TracebackException.from_exception(error)
    return next(filter(None, map(_line_of_user, _with_causes(described))), "")


def _with_causes(described: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    yield described
    for other in (described.__cause__, described.__context__):
        if other is not None:
            yield from _with_causes(other)


def _line_of_user(described: traceback.TracebackException) -> str:
    known = [(frame, _library_of(frame)) for frame in reversed(described.stack)]
    own = [frame for frame, library in known if library == ""]
    own += [frame for frame, library in known if library == "an installed package"]
    if not own:
        return ""
    source = f": {own[0].line}" if own[0].line else ""
    return f"{own[0].filename}, line {own[0].lineno}, in {own[0].name}{source}"


def _library_of(frame: traceback.FrameSummary) -> str:
    """The library of a frame; empty for the user's own code."""
    name = frame.filename
    if name.startswith(f"{_SPARKDL}/"):
        return "sparkdl"
    for folder in _INSTALLED:
        if name.startswith(f"{folder}/"):
            return "torch" if name.startswith(f"{folder}/torch/") else "an installed package"
    return "Python" if name.startswith(_STANDARD) else ""


class _Folded(traceback.StackSummary):
    """Frames of a traceback. It shows the number of those of sparkdl, torch and Python itself, and all others."""

    def format(self, **options: bool) -> list[str]:
        lines: list[str] = []
        folded: list[str] = []
        for index, frame in enumerate(self):
            library = _library_of(frame)
            if library in ("sparkdl", "torch", "Python") and index < len(self) - 1:
                folded.append(library)
                continue
            lines += [*_fold(folded), *traceback.StackSummary.from_list([frame]).format(**options)]
            folded = []
        return lines


def _fold(folded: list[str]) -> list[str]:
    if not folded:
        return []
    of = " and ".join(dict.fromkeys(folded))
    return [f"  ... {count_of(len(folded), 'frame')} of {of}\n"]
