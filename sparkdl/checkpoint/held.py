"""A checkpoint in the memory of a process: training continues from it when the ranks form another world."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.checkpoint.folder import Manifest
from sparkdl.torch.buffers import local_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from sparkdl.checkpoint.tensors import Content


@dataclass(frozen=True)
class HeldCheckpoint:
    """What a checkpoint in a folder would hold of this rank, for ranks that have the same part of the model.

    Attributes:
        content: the content; of a tensor that is divided among ranks, this rank's part.
        shapes: shapes of the whole tensors, by name.
        url: name of the place in messages.
    """

    content: Content
    shapes: Mapping[str, list[int]]
    url: str = "in memory"

    @classmethod
    def of(cls, content: Content) -> HeldCheckpoint:
        """Hold the content of a checkpoint, which training no longer changes."""
        parts = {name: local_part(tensor) for name, tensor in content.tensors.items()}
        shapes = {name: list(tensor.shape) for name, tensor in content.tensors.items()}
        return cls(replace(content, tensors=parts), shapes)

    @property
    def manifest(self) -> Manifest:
        """The manifest that a checkpoint in a folder would have, without files."""
        content = self.content
        tensors = {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": self.shapes[name]}
            for name, tensor in content.tensors.items()
        }
        return Manifest(about=content.about, groups=content.groups, tensors=tensors)

    def load_state(self) -> dict[str, Any]:
        """Return all state but the tensors."""
        return self.content.state

    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the held values into the tensors of the same names."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                local_part(tensor).copy_(self.content.tensors[name])
