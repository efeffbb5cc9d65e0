"""What a rank is told by its task when the tasks have met, for tests that start one rank."""

from __future__ import annotations

from typing import Any

from sparkdl.collective import Coordinator


def order_of_one(coordinator: Coordinator, secret: bytes) -> dict[str, Any]:
    """That of the only rank of a world."""
    return {
        "rank": 0,
        "world_size": 1,
        "secret": secret.hex(),
        "coordinator": coordinator.address.to_bytes().decode(),
        "transport": "auto",
        "wire": "float32",
        "operation_timeout_s": 10.0,
    }
