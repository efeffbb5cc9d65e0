"""Sizes in bytes as people write them: ``1KiB``, ``4MiB``."""

from __future__ import annotations

import re

from sparkdl.errors import ParamError

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_size(text: str) -> int:
    """The number of bytes that ``text`` means, such as ``"256KiB"``.

    Raises:
        ParamError: if it is no size above zero.
    """
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise ParamError(f"size {text!r} is not understood; write it as 512, 16KiB, 4MiB or 1GiB")
    return int(match[1]) * _UNITS[match[2]]


def format_size(num_bytes: int) -> str:
    """The shortest way of writing a number of bytes that :func:`parse_size` takes back."""
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return f"{num_bytes}B"
