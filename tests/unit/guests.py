"""The guests and the core, as the import contract in pyproject.toml lists them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def _contract() -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return next(
        contract for contract in settings["contracts"] if contract["name"].startswith("The core imports")
    )


GUESTS: tuple[str, ...] = tuple(_contract()["forbidden_modules"])
CORE: tuple[str, ...] = tuple(_contract()["source_modules"])


def is_of_guest(module: str) -> bool:
    return any(f"{module}.".startswith(f"{guest}.") for guest in GUESTS)
