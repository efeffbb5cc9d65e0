from __future__ import annotations

from tests.servers.fresh_mlflow import tracked

__all__ = ["tracked"]
