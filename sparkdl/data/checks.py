"""Checks of resumed states in :mod:`sparkdl.data`. Runs anywhere.

A state that a program passes back is checked for its parts and its version; what the parts hold is as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import DataError, ParamError


@dataclass(frozen=True)
class StateKind:
    """One kind of state.

    Attributes:
        name: name of the object whose state it is, such as ``feed``; used in error messages.
        parts: keys that a state must have.
        version: version of the state's format that this sparkdl writes and reads; None for a state without one.
    """

    name: str
    parts: tuple[str, ...]
    version: int | None = None

    def check(self, state: Any) -> None:
        """Check that a state has all parts and the right version.

        Raises:
            ParamError: if it is something else; the message names the missing parts.
            DataError: if it has another version.
        """
        missing = [part for part in self.parts if not isinstance(state, Mapping) or part not in state]
        if missing:
            lacks = f" It lacks {', '.join(missing)}." if len(missing) < len(self.parts) else ""
            raise ParamError(
                f"This is not a state of a {self.name}: {str(state)[:80]}.{lacks} Give what a {self.name}'s state() "
                f"returned, a dict of {', '.join(self.parts)}."
            )
        if self.version is not None and state["version"] != self.version:
            raise DataError(
                f"The state has version {state['version']}; this sparkdl reads version {self.version}. Resume with "
                "the version of sparkdl that wrote it."
            )
