"""Extension of ``import torch`` that connects torch.distributed in a rank of sparkdl to the other ranks.

Runs on the *rank*, and does nothing elsewhere. The entry point ``torch.backends`` names :func:`load`, which torch
calls at the end of ``import torch`` unless ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0. A program that never imports
sparkdl can therefore call ``init_process_group("sparkdl")``, and ``env://`` connects it to the job's coordinator.
Heavy modules are imported only by such a call, because the processes that a rank starts, such as DataLoader workers,
import torch as well.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MARK = "SPARKDL_COORDINATOR"
"""Environment variable that every rank of ``sparkdl run`` has; see :mod:`sparkdl.collective.job`."""

_ACCELERATE = "accelerate.state"


def load() -> None:
    """Register the backend and the rendezvous in a rank; both import :mod:`sparkdl.torch` on first use."""
    if not os.environ.get(_MARK):
        return
    import torch.distributed as dist

    if not dist.is_available():  # this torch was built without torch.distributed
        return
    from torch.distributed.rendezvous import _rendezvous_handlers

    if "sparkdl" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "sparkdl", _create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )
    # torch's register_rendezvous_handler refuses a scheme that has a handler.
    for scheme in ("env", "tcp", "file"):
        _rendezvous_handlers[scheme] = partial(_rendezvous, scheme)
    teach_accelerate()


def teach_accelerate() -> None:
    """Make Accelerate connect ranks that have no GPU, over the requested backend; also if it is imported later.

    On its own, Accelerate connects ranks without a GPU only if it is given ``cpu=True`` (``use_cpu`` of Hugging
    Face's TrainingArguments), and then accepts no backend but Gloo.
    """
    module = sys.modules.get(_ACCELERATE)
    if module is not None:
        _adapt(module)
    elif not any(isinstance(finder, _AccelerateFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AccelerateFinder())


def _create_process_group(options: Any, second: object) -> Any:
    from sparkdl.torch.registration import create_process_group

    return create_process_group(options, second)


def _rendezvous(scheme: str, url: str, **kwargs: Any) -> Iterator[Any]:
    from sparkdl.torch.registration import HANDLERS

    return HANDLERS[scheme](url, **kwargs)


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
