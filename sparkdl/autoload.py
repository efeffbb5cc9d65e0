"""What torch loads when it is imported: in a rank of ours it makes torch.distributed find the other ranks.

Runs on the *rank*, and does nothing elsewhere. The entry point ``torch.backends`` names :func:`load`, which torch
calls at the end of ``import torch`` unless ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0. So a program that never imports
sparkdl can call ``init_process_group("sparkdl")``, and its ``env://`` leads to our coordinator. Nothing heavy is
imported before it does, as the processes that a rank starts import torch too, such as the workers of a DataLoader.
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
"""What the environment of a rank of ``sparkdl run`` has; see :mod:`sparkdl.collective.job`."""

_ACCELERATE = "accelerate.state"


def load() -> None:
    """Register the backend and the rendezvous, both of which import :mod:`sparkdl.torch` on first use, in a rank."""
    if not os.environ.get(_MARK):
        return
    import torch.distributed as dist

    if not dist.is_available():  # a torch that was built without it
        return
    from torch.distributed.rendezvous import _rendezvous_handlers

    if "sparkdl" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "sparkdl", _create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )
    # torch refuses to register a second handler of a scheme.
    for scheme in ("env", "tcp", "file"):
        _rendezvous_handlers[scheme] = partial(_rendezvous, scheme)
    teach_accelerate()


def teach_accelerate() -> None:
    """Have Accelerate, once it is imported, connect ranks without a GPU by the backend that was asked for.

    By itself it leaves ranks unconnected that have no GPU, unless it was given ``cpu=True`` (``use_cpu`` of Hugging
    Face's TrainingArguments), and then refuses each backend but Gloo.
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
    """Finds one module as the others do, and adapts it when it has been executed."""

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

            spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign]  # of this import alone
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
