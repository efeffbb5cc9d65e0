"""Where a fit stands among others: alone, or one of several Param maps or of a CrossValidator's folds. *Driver*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.tracking import RunGroup


@dataclass(frozen=True, kw_only=True)
class PlaceOfFit:
    """Where a fit stands among others.

    Attributes:
        group: of the runs that the fit's run is one of; None of a fit that is alone, or not tracked.
        tags: that tell its run from the others.
    """

    group: RunGroup | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


ALONE = PlaceOfFit()
