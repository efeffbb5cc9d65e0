"""Peak operations per second of NVIDIA GPUs, from their data sheets. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """Peak operations per second of a GPU, for dense products, from its data sheet.

    Attributes:
        words: words that CUDA's name of the GPU contains.
        half: products in bfloat16, on V100 and T4 in float16.
        single: products in float32; TF32 is not used, as torch does not by default.
    """

    words: tuple[str, ...]
    half: float
    single: float


def _sheet(words: str, half: float, single: float) -> DataSheet:
    return DataSheet(words=tuple(words.split()), half=half * 1e12, single=single * 1e12)


DATA_SHEETS = {
    "h200": _sheet("H200", 989, 67),
    "h100-pcie": _sheet("H100 PCIe", 756, 51),
    "h100": _sheet("H100", 989, 67),
    "a100": _sheet("A100", 312, 19.5),
    "l40s": _sheet("L40S", 362, 91.6),
    "l4": _sheet("L4", 121, 30.3),
    "a10g": _sheet("A10G", 70, 35),
    "v100": _sheet("V100", 125, 15.7),
    "t4": _sheet("T4", 65, 8.1),
}
"""Data sheets by name of the GPU; a GPU has the first one whose words are in its name."""


_OTHERS = {"MIG", "NVL"}
"""Words of names of GPUs that are slower than their data sheet here: a part of a GPU, and cards with less power."""


def data_sheet_of(name: str) -> DataSheet | None:
    """Return the data sheet of a GPU by the name that CUDA gives to it, such as ``NVIDIA H100 80GB HBM3``."""
    words = set(re.split("[ -]", name))
    if words & _OTHERS:
        return None
    return next((sheet for sheet in DATA_SHEETS.values() if words.issuperset(sheet.words)), None)
