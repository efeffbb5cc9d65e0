"""``torch.compile`` leaves functions alone, without an import of the compiler.

``torch.compiler.disable`` would import the compiler at the first call, which takes a second in every rank. This sets
the marks that it sets: an attribute, and the strategy of the code object.

Upstream: https://github.com/pytorch/pytorch/pull/104317 moved the import to the first call. Versions: all up to torch
2.13; the strategy since 2.7. It can go when a function can be excluded without the import.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Target = TypeVar("Target", bound=Callable[..., Any])


def not_compiled(target: Target) -> Target:
    """Decorate a function, or a class with its methods, so that ``torch.compile`` does not compile it or what it calls.

    It treats torch's own groups in the same way, as their methods are C++.
    """
    for function in vars(target).values() if isinstance(target, type) else (target,):
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a frame that calls it does not inline it
            if hasattr(eval_frame, "set_code_exec_strategy"):  # since torch 2.7
                skip = eval_frame._FrameAction.SKIP
                eval_frame.set_code_exec_strategy(
                    function.__code__, eval_frame._FrameExecStrategy(skip, skip)
                )
    return target
