"""Accelerate connects ranks that have no GPU, over the requested backend.

On its own, Accelerate connects ranks without a GPU only if it is given ``cpu=True`` (``use_cpu`` of Hugging Face's
TrainingArguments), and then accepts no backend but Gloo.

Upstream: https://github.com/huggingface/accelerate/pull/63 made it so. Versions: all up to 1.15. It can go when
``PartialState`` takes a backend that it does not know for ranks on the CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_ACCELERATE = "accelerate.state"


def teach_accelerate() -> None:
    """Make Accelerate connect ranks that have no GPU; also if it is imported later."""
    module = sys.modules.get(_ACCELERATE)
    if module is not None:
        _adapt(module)
    elif not any(isinstance(finder, _AccelerateFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AccelerateFinder())


class _AccelerateFinder(importlib.abc.MetaPathFinder):
    """Finds ``accelerate.state`` through the other finders, and adapts the module after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != _ACCELERATE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                _adapt(module)

            spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign]  # for this import only
        return spec


def _adapt(module: ModuleType) -> None:
    choose = module.PartialState._prepare_backend
    if hasattr(choose, "__wrapped__"):
        return
    parameters = inspect.signature(choose)

    @wraps(choose)
    def choose_for_rank(*args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        backend, kind = choose(*args, **kwargs)
        without_gpu = (module.DistributedType.NO, module.DistributedType.MULTI_CPU)
        if "LOCAL_RANK" not in os.environ or kind not in without_gpu:
            return backend, kind
        wanted = parameters.bind(*args, **kwargs).arguments.get("backend")
        return wanted or "gloo", module.DistributedType.MULTI_CPU

    module.PartialState._prepare_backend = choose_for_rank
