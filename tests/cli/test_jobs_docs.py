"""What docs/jobs.md shows is true: its job is valid, and its messages are the real ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sparkdl.errors import JobFileError
from sparkdl.jobs.imports import code_files, importable
from sparkdl.jobs.job import SOURCES, read_job, read_prediction_job
from sparkdl.jobs.make_estimator import make_estimator
from sparkdl.jobs.yaml_tree import SECTIONS, read_override

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "jobs.md").read_text()
NETS = """\
from torch import nn


def make_net(hidden):
    return nn.Sequential(nn.Linear(64, hidden), nn.Linear(hidden, 10))
"""


def make(folder: Path, *arguments: str, number: int = 0):
    text = re.findall(r"```yaml\n(.*?)```", DOCS, flags=re.DOTALL)[number]
    sys.modules.pop("my_models", None)
    (folder / "my_models.py").write_text(NETS)
    (folder / "job.yaml").write_text(text)
    job = read_job(folder / "job.yaml", [read_override(argument) for argument in arguments])
    with importable(code_files(job)):
        return make_estimator(job)


def test_jobs_in_the_docs_are_valid(tmp_path):
    estimator = make(tmp_path)
    assert estimator.getModel()[0].out_features == 64
    assert estimator.getEpochs() == 10
    to_try = make(tmp_path, number=1)
    assert type(to_try).__name__ == "TorchClassifier"
    assert to_try.getFeaturesCol() == "x"
    prediction = read_prediction_job(tmp_path / "job.yaml")
    assert (prediction.data.kind, prediction.output) == ("sql", "scored-numbers")


def test_every_key_is_in_the_docs():
    for key in (*SECTIONS, *SOURCES):
        assert f"`{key}`" in DOCS


def test_error_message_in_the_docs_is_the_real_one(tmp_path):
    with pytest.raises(JobFileError) as caught:
        make(tmp_path, "batchSize=0")
    assert f"sparkdl: {caught.value}\n" in DOCS


@pytest.mark.parametrize("argument", re.findall(r"`([\w.]+=[\w.]*)`", DOCS))
def test_overrides_in_the_docs_can_be_parsed(argument):
    assert read_override(argument).path
