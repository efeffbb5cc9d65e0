"""What makes ranks alike before training, under the module name that Horovod has for it."""

from __future__ import annotations

from sparkdl.horovod.torch.objects import allgather_object, broadcast_object
from sparkdl.horovod.torch.optimizer_state import broadcast_optimizer_state
from sparkdl.horovod.torch.parameter_values import broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
