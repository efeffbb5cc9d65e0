"""What :func:`sparkdl.autolog` has switched, as fits ask for it. Runs on the *driver*.

MLflow itself keeps the arguments of the last call, as it does for its own integrations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INTEGRATION = "sparkdl"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Switches of ``sparkdl.autolog``, with the values that hold without a call; see there what each does."""

    log_models: bool = True
    log_input_examples: bool = True
    log_model_signatures: bool = True
    log_datasets: bool = True
    disable: bool = False
    exclusive: bool = False
    disable_for_unsupported_versions: bool = False
    silent: bool = False
    every_n_iter: int = 1
    registered_model_name: str | None = None
    extra_tags: Mapping[str, str] | None = field(default=None)


def current_switches() -> Switches:
    """Return the switches of the last call of ``sparkdl.autolog``; the defaults where there was none."""
    from mlflow.utils.autologging_utils import AUTOLOGGING_INTEGRATIONS

    told: dict[str, Any] = AUTOLOGGING_INTEGRATIONS.get(INTEGRATION) or {}
    return Switches(**told)
