"""Functions as Horovod's documentation writes them for its entries; only the import of ``hvd`` differs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def fn(magic_number):
    import sparkdl.horovod.torch as hvd

    hvd.init()
    print(f"Hello, rank = {hvd.rank()}, size = {hvd.size()}, magic_number = {magic_number}")
    return hvd.rank(), hvd.size(), os.environ.get("GREETING")


def train_elastically(marker, epochs=12):
    import torch

    import sparkdl.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):  # noqa: B020 - so in its documentation
            if state.epoch == 3 and hvd.rank() == 1 and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)  # so that a rank can come while others train
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            state.sizes = [*state.sizes, hvd.size()]
            state.commit()

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sizes=[])
    state.register_reset_callbacks([on_state_reset])
    train(state)
    return state.sizes, model.weight.detach().sum().item()
