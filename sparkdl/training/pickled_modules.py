"""Tells which modules a pickle imports when it is read, without reading it. Runs on the *driver*.

A pickle is a program for a stack machine (https://docs.python.org/3/library/pickletools.html). Classes and functions
are fetched by module and name, and cloudpickle fetches the modules that a function written out with its code refers to
by a call of its ``subimport``.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

_SUBIMPORT = "subimport"
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_GETS = ("BINGET", "LONG_BINGET", "GET")
_PUTS = ("BINPUT", "LONG_BINPUT", "PUT")


@dataclass(frozen=True)
class _Global:
    """A class or function on the stack."""

    module: str
    name: str


def modules_in_pickle(pickled: bytes) -> set[str]:
    """Return the full names of the modules that are imported to read a pickle, and to call functions in it.

    Modules that such a function imports inside its body are not found.
    """
    modules: set[str] = set()
    memo: dict[int, str | _Global | None] = {}
    pushed: list[str | _Global | None] = [None, None]
    for opcode, given, _ in pickletools.genops(pickled):
        argument: Any = given
        if opcode.name == "FRAME":  # may begin anywhere, and is nothing on the stack
            continue
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
            continue
        if opcode.name in _PUTS:
            memo[int(argument)] = pushed[-1]
            continue
        value: str | _Global | None = None
        if opcode.name in _STRINGS:
            value = argument
        elif opcode.name in _GETS:
            value = memo.get(int(argument))
        elif opcode.name == "STACK_GLOBAL":
            module, name = pushed[-2:]
            assert isinstance(module, str), "pickle has just pushed it"
            assert isinstance(name, str), "likewise"
            value = _Global(module, name)
        elif opcode.name == "GLOBAL":
            value = _Global(*argument.split(" "))
        if isinstance(value, _Global):
            modules.add(value.module)
        elif isinstance(value, str) and isinstance(pushed[-1], _Global) and pushed[-1].name == _SUBIMPORT:
            modules.add(value)
        pushed = [pushed[-1], value]
    return modules
