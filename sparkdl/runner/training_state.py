"""``TrainingState``: what outlives lost ranks, for functions that were not written for Horovod. Runs on a *rank*."""

from __future__ import annotations

from typing import Any

import sparkdl.horovod.torch as hvd
from sparkdl.horovod.torch.elastic import TorchState
from sparkdl.horovod.torch.elastic.commits import take_up_commit


class TrainingState(TorchState):
    """Modules, optimizers and plain values of a training; each is an attribute.

    When it is made, all ranks get what was committed last by the ranks before them, or else what rank 0 has. Every rank
    makes it, at the same point of the program. ``commit()`` is called by every rank, too, after a step that all have
    made::

        state = TrainingState(model=model, optimizer=optimizer, epoch=0)
        while state.epoch < 10:
            train_one_epoch(model, optimizer)
            state.epoch += 1
            state.commit()

    Rank 0 writes a commit to the Runner's ``checkpoint_dir`` before ``commit()`` returns there, which takes as long as
    writing model and optimizer takes.

    Modules that FSDP2 or tensor parallelism made of DTensors, pipeline stages, and their optimizers are committed
    by all ranks together, each of which writes its own pieces. They are taken up by as many ranks, laid out in the
    same way; where nothing was committed yet, they stay as the ranks have them, which have to begin with the same
    weights.

    Args:
        parts: modules, optimizers and samplers of :mod:`sparkdl.horovod.torch` are kept by their ``state_dict``;
            anything else as it is: tensors, numbers, strings, and lists and dictionaries of them.

    Raises:
        CheckpointError: if the commit of sharded parts was made by another number of ranks or in another layout.
        ParamError: if a part is sharded by FSDP1.
    """

    def __init__(self, **parts: Any) -> None:
        if not hvd.is_initialized():
            hvd.init()
        super().__init__(**parts)
        take_up_commit(self)
        self.sync()
