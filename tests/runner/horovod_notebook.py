"""A training like the one in Databricks' notebook for HorovodRunner and PyTorch, on made-up digits.

The only difference from a notebook for Databricks' class is the line that imports ``hvd``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import sparkdl.horovod.torch as hvd
from sparkdl.collective import current_communicator
from sparkdl.runner import progress

BATCH_SIZE = 16
NUM_EPOCHS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3)
        self.dropout = nn.Dropout2d(0.1)
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.dropout(self.conv(x)))
        return functional.log_softmax(self.fc(x.flatten(1)), dim=1)


def get_dataset() -> TensorDataset:
    """Make rows in which each digit is one bright spot, with some noise."""
    generator = torch.Generator().manual_seed(1)
    digits = torch.arange(320) % 10
    images = torch.rand(320, 1, 8, 8, generator=generator)
    for image, digit in zip(images, digits.tolist(), strict=True):
        image[0, digit // 4 * 3, digit % 4 * 2] += 4
    return TensorDataset(images, digits)


def train_one_epoch(model, device, data_loader, optimizer, epoch):
    model.train()
    for data, target in data_loader:
        data, target = data.to(device), target.to(device)  # noqa: PLW2901
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    return loss.item()


def save_checkpoint(log_dir, model, optimizer, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, Path(log_dir, f"checkpoint-{epoch}.pth.tar"))


def train_hvd(learning_rate, log_dir):
    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank())  # pin GPU to local rank

    from torch.utils.data.distributed import DistributedSampler

    train_dataset = get_dataset()
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_dataset, batch_size=BATCH_SIZE, sampler=train_sampler)

    torch.manual_seed(5 + hvd.rank())
    model = Net().to(device)
    # The effective batch size is scaled by the number of workers, and the learning rate with it.
    optimizer = optim.SGD(model.parameters(), lr=learning_rate * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Broadcast initial parameters so all workers start with the same parameters.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    losses = []
    for epoch in range(1, NUM_EPOCHS + 1):
        losses.append(train_one_epoch(model, device, train_loader, optimizer, epoch))
        # Only the first worker saves checkpoints, to prevent conflicts between workers.
        if hvd.rank() == 0:
            save_checkpoint(log_dir, model, optimizer, epoch)
    return losses


def how_long_ranks_wait():
    hvd.init()
    progress()
    progress(done=True)
    return current_communicator().timeout_s


def where_am_i(word="none"):
    hvd.init()
    print("said", word)
    return os.getpid(), hvd.rank(), hvd.size(), hvd.local_size(), word
