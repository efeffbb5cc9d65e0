"""Every function that takes a path or URL: what it writes lies where the path says, as it stands, and is read again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import s3fs
import torch

import sparkdl.mlflow
from sparkdl.checkpoint.commit_place import CommitPlace
from sparkdl.data import Store
from sparkdl.data.files.filesystems import open_location
from sparkdl.data.files.lease import hold_alone
from sparkdl.errors import SparkdlError
from sparkdl.estimators import LanguageModelModel, TorchEstimator, TorchModel
from sparkdl.estimators.ready_made.language import text_model
from sparkdl.jobs.output import FORMAT, JobOutput
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.networks.generation import Generation
from sparkdl.networks.language import TokenNumbers
from sparkdl.tracking.kept_runs import KeptRun, keep_run
from sparkdl.tracking.sender import Message
from sparkdl.tracking.start import RunStart
from sparkdl.training.checkpoint.fit_manifest import fit_folder
from tests.servers.s3_server import S3, s3, s3_endpoint
from tests.unit.checkpoint.test_commits import keep, read
from tests.unit.checkpoint.test_folder import epochs_in, write
from tests.unit.estimators.public_classes import ESTIMATORS, MODELS
from tests.unit.mlflow.model_examples import many_into_many

__all__ = ["s3", "s3_endpoint"]

FORMS = {
    "plain": "{folder}/x",
    "relative": "x",
    "blank and percent": "{folder}/a b/x%20y",
    "file:": "file:{folder}/x",
    "file: with blank and percent": "file:{folder}/a b/x%20y",
    "file:///": "file://{folder}/x",
    "s3": "s3://{bucket}/x",
    "s3a": "s3a://{bucket}/deep/x",
    "s3 with blank and percent": "s3://{bucket}/a b/x%20y",
}


def save_twice(make, kind):
    def use(url):
        make().save(url)
        second = make()
        second.write().overwrite().save(url)
        assert kind.load(url).uid == second.uid

    return use


def use_flavor(url):
    model = many_into_many()
    sparkdl.mlflow.save_model(model, url)
    assert sparkdl.mlflow.load_model(url).uid == model.uid
    weight = sparkdl.mlflow.load_module(url).kind.weight
    assert torch.equal(weight, model.module.kind.weight)


def use_save_pretrained(url):
    pytest.importorskip("transformers")
    options = {"generation": Generation(), "max_length": 32, "takes_tokens": True}
    decoder = Decoder(DecoderSizes(vocabulary=8, width=8, layers=1, heads=2))
    model = LanguageModelModel(
        text_model(decoder, TokenNumbers(8), column="t", answer="continuation", **options)
    )
    model.save_pretrained(url)
    model.save_pretrained(url, overwrite=True)


def use_job_output(url):
    output = JobOutput(url)
    output.check_writable()
    for loss in (0.5, 0.25):
        model = MODELS["TorchModel"]()
        output.write(model, {"format": FORMAT, "job": {}, "loss": loss})
        assert JobOutput(url).result() == {"format": FORMAT, "job": {}, "loss": loss}
        assert TorchModel.load(f"{url}/model").uid == model.uid


def use_store(url):
    store = Store(url)
    store.check_writable()
    with store.stage_dataset("rows") as staged:
        store.location.filesystem.pipe_file(f"{store.location.path}/{staged.url.rpartition('/')[2]}/f", b"1")
    (Path("run") / "deep").mkdir(parents=True)
    (Path("run") / "deep" / "f").write_bytes(b"12")
    message = Message(kind="folder", content={"path": "f"}, folder=Path("run").absolute())
    run = KeptRun(tracking_uri="", start=RunStart(key="a"), run=None, messages=[message])
    there = open_location(keep_run(run, store))
    there.fetch_folder(Path("run").absolute())
    assert Path("run/0000/deep/f").read_bytes() == b"12"
    shutil.rmtree("run")


def use_checkpoints(url):
    write(fit_folder(url), 2)
    assert epochs_in(fit_folder(url)) == [2]


def use_commits(url):
    with hold_alone(url, print, user="run", setting="checkpoint_dir") as lease:
        keep(CommitPlace(url, lease.name), 1)
    assert read(CommitPlace(url, lease.name)) == 1


FUNCTIONS = {
    "model": save_twice(MODELS["TorchModel"], TorchModel),
    "estimator": save_twice(ESTIMATORS["TorchEstimator"], TorchEstimator),
    "classifier": save_twice(ESTIMATORS["TorchClassifier"], type(ESTIMATORS["TorchClassifier"]())),
    "sparkdl.mlflow": use_flavor,
    "save_pretrained": use_save_pretrained,
    "output of a job": use_job_output,
    "Store": use_store,
    "checkpointDir": use_checkpoints,
    "checkpoint_dir": use_commits,
}


@pytest.mark.parametrize("form", FORMS)
def test_functions_write_where_a_path_leads_as_it_stands_and_read_there(form, s3: S3, tmp_path, monkeypatch):
    # Some versions make this folder at once.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    for name, use in FUNCTIONS.items():
        if name == "sparkdl.mlflow" and "percent" not in form:  # takes seconds
            continue
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        monkeypatch.chdir(folder)
        bucket = s3.make_bucket()
        use(FORMS[form].format(folder=folder, bucket=bucket))
        place = FORMS[form].format(folder="", bucket="").partition(":")[2] or FORMS[form].format(folder="")
        place = place.lstrip("/")
        if form.startswith("s3"):
            assert s3fs.S3FileSystem().find(f"{bucket}/{place}"), name
            assert os.listdir(folder) == [], name
        else:
            assert (folder / place).is_dir(), name
            assert len(os.listdir(folder)) == 1, name


def test_no_function_makes_a_bucket_from_a_mistyped_name(s3: S3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    s3.make_bucket()
    before = s3fs.S3FileSystem().ls("", refresh=True)
    for name, use in FUNCTIONS.items():
        with pytest.raises(
            SparkdlError, match=r"s3://no-such-bucket/x.*there is no such bucket.*fix the URL"
        ):
            use("s3://no-such-bucket/x")
        assert s3fs.S3FileSystem().ls("", refresh=True) == before, name
