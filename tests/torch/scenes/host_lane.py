"""A lane whose device is the host, to test the code for GPU lanes without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.collective import Handle


class HostLane:
    """A lane whose calls complete in order at once, except those of NCCL's stand-in, whose streams are threads."""

    @contextmanager
    def beside(self, tensors: Sequence[torch.Tensor], *, asynchronous: bool) -> Iterator[int]:
        yield 0

    def streams(self, *, asynchronous: bool) -> tuple[int, int]:
        return 0, 0

    def is_capturing(self) -> bool:
        return False

    @contextmanager
    def on_side(self, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
        yield 0

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def has_reached(self, mark: Any) -> bool:
        return True

    @contextmanager
    def after(self, mark: Any, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
        yield 0

    def order(self, handle: Handle) -> None:
        handle.wait(20.0)

    def mark(self) -> None:
        pass

    def join(self, mark: Any) -> None:
        pass

    def block(self, mark: Any) -> None:
        pass

    def host_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full(tensor.shape, 77).to(tensor.dtype)  # makes missing copies visible

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()
