"""``hvd.SyncBatchNorm``: batch normalization with the statistics of all ranks' rows.

Unlike Horovod's, it also takes CPU tensors.
"""

from __future__ import annotations

import torch

from sparkdl.horovod.torch.basics import size
from sparkdl.horovod.torch.names import Sum
from sparkdl.horovod.torch.operations.allreduce import allreduce
from sparkdl.torch.sync_batch_norm import CrossRankBatchNorm


class SyncBatchNorm(CrossRankBatchNorm):
    """Replaces ``torch.nn.BatchNorm1d``, ``2d`` and ``3d``, with the same arguments.

    The input has shape ``(rows, num_features, ...)``; the number of rows may differ between ranks.
    """

    def _num_ranks(self) -> int:
        return size()

    def _add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce(tensor, op=Sum)
