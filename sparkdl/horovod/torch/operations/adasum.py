"""Where Adasum can be asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkdl.horovod.torch.current_session import session
from sparkdl.horovod.torch.operations.target import check_tensors
from sparkdl.horovod.torch.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.torch.requests.adasum import ADASUM_DTYPES


def check_adasum(tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    """Check that tensors can be combined by Adasum.

    Raises:
        NotImplementedError: if not all ranks take part, or their number is not a power of 2.
        ValueError: if a tensor is not of a floating-point dtype.
    """
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if session().world.world_size.bit_count() != 1:
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    check_tensors(tensors, ADASUM_DTYPES)
