"""A checkpoint in the memory of a process. Training continues from it when the ranks form another world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.checkpoint.folder import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from sparkdl.checkpoint.tensors import Content


@dataclass(frozen=True)
class HeldCheckpoint:
    """What a checkpoint in a folder would hold, of a model that is not divided among ranks.

    Attributes:
        content: the content.
        url: name of the place in messages.
    """

    content: Content
    url: str = "in memory"

    @property
    def manifest(self) -> Manifest:
        """The manifest that a checkpoint in a folder would have, without files."""
        content = self.content
        tensors = {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in content.tensors.items()
        }
        return Manifest(about=content.about, groups=content.groups, tensors=tensors)

    def load_state(self) -> dict[str, Any]:
        """Return all state but the tensors."""
        return self.content.state

    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with those of the same names."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.content.tensors[name])
