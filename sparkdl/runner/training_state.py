"""``TrainingState``: a state that survives lost ranks, for functions not written for Horovod."""

from __future__ import annotations

from typing import Any

import sparkdl.horovod.torch as hvd
from sparkdl.horovod.torch.elastic import TorchState
from sparkdl.horovod.torch.elastic.commits import take_up_commit


class TrainingState(TorchState):
    """Modules, optimizers and plain values of a training; each is an attribute.

    Every rank has to create the state, at the same point of the program. All ranks then get the last commit of the
    ranks before them, or rank 0's values if there is no commit. Every rank also has to call ``commit()``, after a step
    that all ranks have made::

        state = TrainingState(model=model, optimizer=optimizer, epoch=0)
        while state.epoch < 10:
            train_one_epoch(model, optimizer)
            state.epoch += 1
            state.commit()

    Rank 0 writes a commit to the Runner's ``checkpoint_dir`` before its ``commit()`` returns; the call thus takes as
    long as writing the model and the optimizer.

    Modules whose parameters are DTensors (by FSDP2 or tensor parallelism), pipeline stages, and their optimizers are
    committed by all ranks together: each rank writes its own pieces. They can be restored by the same number of ranks
    in the same layout. If there is no commit, each rank keeps the values that it has, so the ranks have to begin with
    the same weights.

    Args:
        parts: parts of the state, by name. Modules, optimizers and samplers of :mod:`sparkdl.horovod.torch` are kept as
            their ``state_dict``, all other values as they are: tensors, numbers, strings, and lists and dictionaries of
            them.

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
