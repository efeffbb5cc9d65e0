from __future__ import annotations

from tests.fresh_mlflow import tracked

__all__ = ["tracked"]
