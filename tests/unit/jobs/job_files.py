"""Job files for tests."""

from __future__ import annotations

import sys
from pathlib import Path

from sparkdl.jobs.job import TrainingJob, read_job
from sparkdl.jobs.yaml_tree import read_override

NETS = """\
from torch import nn


def make_net(hidden=8):
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def make_nothing():
    return None


def half_loss(outputs, labels, weight=0.5):
    return weight * nn.functional.cross_entropy(outputs, labels)


net = nn.Linear(4, 3)
"""

JOB = """\
data:
  parquet: rows
  validation: 0.2
model:
  import: my_nets:make_net
  arguments:
    hidden: 16
params:
  optimizer:
    import: torch.optim:SGD
    arguments: {lr: 5e-1}
  loss: torch.nn:CrossEntropyLoss
  featuresCol: image
  labelCol: digit
  cache: off
  epochs: 2
tracking: off
output: out
"""


def write_job(folder: Path, text: str = JOB) -> Path:
    """Write a job, and the module of its networks, which is imported again; return the path of the job."""
    sys.modules.pop("my_nets", None)
    (folder / "my_nets.py").write_text(NETS)
    file = folder / "job.yaml"
    file.write_text(text)
    return file


def read(folder: Path, *arguments: str, text: str = JOB) -> TrainingJob:
    """Write a job, and read it with arguments that change it."""
    return read_job(write_job(folder, text), [read_override(argument) for argument in arguments])
