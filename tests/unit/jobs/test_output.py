from __future__ import annotations

import json
import math
from datetime import datetime, timezone

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sparkdl.errors import ParamError, SavedModelError, StoreError, count_of
from sparkdl.estimators import TorchModel, TrainingSummary
from sparkdl.jobs.identity import identity_of
from sparkdl.jobs.job import read_job
from sparkdl.jobs.output import FORMAT, JobOutput, make_result
from sparkdl.training.history import EpochRecord
from tests.unit.estimators.public_classes import MODELS
from tests.unit.jobs.job_files import write_job

RESULT = {"format": FORMAT, "job": {"params.epochs": 1}, "loss": 0.5}


@pytest.fixture
def model() -> TorchModel:
    return MODELS["TorchModel"]()


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    """A location that does not exist yet, on a filesystem that can rename folders and on one that cannot."""
    return str(tmp_path / "models" / "out") if request.param == "local" else f"memory://{tmp_path.name}/out"


def test_written_result_is_read_and_replaced(url, model):
    output = JobOutput(url)
    assert output.result() is None
    output.check_writable()
    assert output.result() is None
    output.write(model, RESULT)
    assert JobOutput(url).result() == RESULT
    assert TorchModel.load(f"{output.url}/model").history == model.history
    output.write(model, {**RESULT, "loss": 0.25})
    assert JobOutput(url).result() == {**RESULT, "loss": 0.25}


def test_job_leaves_only_its_output_folder_also_if_the_next_model_cannot_be_written(tmp_path, model):
    output = JobOutput(str(tmp_path / "out"))
    output.check_writable()
    output.write(model, RESULT)
    output.write(model, RESULT)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model", "result.json"]

    class Unpicklable:
        def __reduce__(self):
            raise RuntimeError("not this one")

    model.module.hook = Unpicklable()
    with pytest.raises(Exception, match="not this one"):
        output.write(model, {**RESULT, "loss": 0.1})
    assert output.result() == RESULT
    assert TorchModel.load(f"{output.url}/model").history == model.history
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_old_output_stays_if_the_new_model_does_not_arrive(url, model, monkeypatch):
    output = JobOutput(url)
    output.write(model, RESULT)
    kind, opened = type(output._location.filesystem), type(output._location.filesystem).open

    def fail(self, path, mode="rb", **options):
        if mode == "wb" and path.endswith("weights.safetensors"):
            raise TimeoutError("the link is down")
        return opened(self, path, mode, **options)

    with monkeypatch.context() as patch, pytest.raises(SavedModelError, match="the link is down"):
        patch.setattr(kind, "open", fail)
        output.write(MODELS["TorchModel"](), {**RESULT, "loss": 0.1})
    assert output.result() == RESULT
    assert TorchModel.load(f"{output.url}/model").uid == model.uid


def test_result_has_the_values_of_the_models_epoch_and_beside_them_those_of_the_last(tmp_path, model):
    records = tuple(
        EpochRecord(
            epoch=epoch,
            loss=1 / epoch,
            rows=1,
            seconds=1.0,
            rows_per_s=1.0,
            data_wait_share=0.25,
            learning_rate=0.1,
            metrics={"val_x": float(x)},
            rank_seconds=(),
        )
        for epoch, x in enumerate((1, 3, 2), start=1)
    )
    job = read_job(write_job(tmp_path))
    for epoch, loss, x in ((2, 0.5, 3.0), (3, 1 / 3, 2.0)):
        summary = TrainingSummary(history=records, model_epoch=epoch)
        began = datetime.now(timezone.utc)
        result = make_result(job, identity_of(job, {}), TorchModel(model.saved, summary), began=began)
        assert (result["model_epoch"], result["loss"], result["metrics"]) == (epoch, loss, {"val_x": x})
        assert result["last"] == {"epoch": 3, "loss": 1 / 3, "metrics": {"val_x": 2.0}}
        assert (result["epochs"], len(result["history"])) == (3, 3)


def test_empty_folder_has_no_result(tmp_path):
    (tmp_path / "out").mkdir()
    assert JobOutput(str(tmp_path / "out")).result() is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("out", "text", "is a file: it was not written by a job. Choose another output"),
        ("out/thesis.tex", "text", "holds thesis.tex and no result.json: it was not written by a job"),
        ("out/result.json", "text", "has a result.json that is not JSON: it was not written by a job"),
        (
            "out/result.json",
            "[1]",
            "has a result.json without the keys format and job: it was not written by a job",
        ),
    ],
)
def test_folder_that_no_job_wrote_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(ParamError, match=message):
        JobOutput(str(tmp_path / "out")).result()


def test_output_that_cannot_be_written_is_known_before_the_fit(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"The output .*/file/out cannot be written"):
        JobOutput(str(tmp_path / "file" / "out")).check_writable()


def test_result_has_null_for_nan_and_infinity(tmp_path, model):
    output = JobOutput(str(tmp_path / "out"))
    output.write(model, {"job": {}, "loss": math.nan, "metrics": {"a": math.inf}, "ranks": (1, 2)})
    text = (tmp_path / "out" / "result.json").read_text()
    assert json.loads(text) == {"job": {}, "loss": None, "metrics": {"a": None}, "ranks": [1, 2]}


def test_errors_of_a_filesystem_plugin_name_the_output(tmp_path, monkeypatch):
    """For example botocore's errors for missing credentials, which are no OSErrors."""
    output = JobOutput(f"memory://{tmp_path.name}/out")

    def fail(filesystem, path):
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, "exists", fail)
    with pytest.raises(StoreError, match="out cannot be read: .*Unable to locate credentials"):
        output.result()


def test_a_job_of_one_epoch_and_rank_is_told_in_the_singular():
    assert [count_of(1, "rank"), count_of(2, "rank"), count_of(1500, "epoch")] == [
        "1 rank",
        "2 ranks",
        "1,500 epochs",
    ]
