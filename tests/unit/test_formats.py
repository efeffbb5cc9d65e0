"""What is saved has the number of its format, and each reader refuses a higher one with the same advice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

import sparkdl
from sparkdl.checkpoint.folder import MANIFEST
from sparkdl.data import BlendedFeed, ParquetFeed, SequencePacker, Store, open_dataset
from sparkdl.data.dataset.dataset import MANIFEST_NAME
from sparkdl.errors import SparkdlError, StoreError
from sparkdl.estimators import TorchEstimator, TorchModel
from sparkdl.estimators.fit.checkpoints import run_key_of
from sparkdl.jobs.identity import identity_of
from sparkdl.jobs.job import read_job
from sparkdl.jobs.output import RESULT, JobOutput, make_result
from sparkdl.model.saved_model import load_model, save_model
from sparkdl.tracking import send_kept_runs
from sparkdl.tracking.kept_runs import RUN_FILE, KeptRun, keep_run
from sparkdl.tracking.start import RunStart
from sparkdl.training.checkpoint.fit_manifest import fit_folder
from tests.training.scenes.training_scenes import write_dataset
from tests.unit.checkpoint.test_folder import write
from tests.unit.data.blend.test_blending import NumberedFeed
from tests.unit.data.store.test_store import commit_copy
from tests.unit.estimators.public_classes import MODELS, make_torch_estimator
from tests.unit.jobs.job_files import write_job

State = Mapping[str, Any]


def in_file(path: Path, read: Callable[[], object]) -> tuple[State, Callable[[State], object]]:
    """The content of a saved file, and a function that replaces and reads it."""

    def replace_and_read(content: State) -> object:
        path.write_text(json.dumps(content))
        return read()

    return json.loads(path.read_text()), replace_and_read


def dataset(folder: Path):
    committed = commit_copy(Store(folder / "store"), write_dataset(folder / "rows", 9))
    return in_file(Path(committed.url, MANIFEST_NAME), partial(open_dataset, committed.url))


def module(folder: Path):
    save_model(MODELS["TorchModel"]().saved, folder / "model")
    return in_file(folder / "model" / "sparkdl_model.json", partial(load_model, folder / "model"))


def model(folder: Path):
    url = str(folder / "model")
    MODELS["TorchModel"]().save(url)
    return in_file(folder / "model" / "metadata" / "part-00000", partial(TorchModel.load, url))


def estimator(folder: Path):
    url = str(folder / "estimator")
    make_torch_estimator().save(url)
    return in_file(folder / "estimator" / "metadata" / "part-00000", partial(TorchEstimator.load, url))


def checkpoint(folder: Path):
    checkpoints = fit_folder(str(folder))
    (path,) = write(checkpoints, 1)
    return in_file(path / MANIFEST, checkpoints.newest)


def run_of_checkpoints(folder: Path):
    run_key_of(str(folder))
    write(fit_folder(str(folder)), 1)
    return in_file(folder / "mlflow_run.json", partial(run_key_of, str(folder)))


def result_of_job(folder: Path):
    job, output = read_job(write_job(folder)), JobOutput(str(folder / "out"))
    trained = MODELS["TorchModel"]()
    output.write(trained, make_result(job, identity_of(job, {}), trained, began=datetime.now(timezone.utc)))
    return in_file(folder / "out" / RESULT, output.result)


def kept_run(folder: Path):
    start = RunStart(key="a", name="a", start_time=1)
    store = Store(folder)
    url = keep_run(KeptRun(tracking_uri="", start=start, run=None, messages=[]), store)

    def send() -> NoReturn:
        (sent,) = send_kept_runs(store)
        raise StoreError(sent.error)

    return in_file(Path(url, RUN_FILE), send)


def feed(folder: Path):
    made = ParquetFeed(write_dataset(folder, 9), columns=["target"], batch_size=2)
    return made.state(), made.resume


def blend(folder: Path):
    feeds = {"rows": ParquetFeed(write_dataset(folder, 9), columns=["target"], batch_size=2)}
    made = BlendedFeed(feeds, {"rows": 1}, batch_size=2)
    return made.state(), made.resume


def other_feed_of_a_blend(folder: Path):
    made = BlendedFeed({"rows": NumberedFeed(9, 2)}, {"rows": 1}, batch_size=2)
    state = made.state()
    return state["feeds"]["rows"], lambda of_feed: made.resume({**state, "feeds": {"rows": of_feed}})


def packer(folder: Path):
    made = SequencePacker(4, batch_size=1)
    return made.state(), made.resume


READERS: dict[str, list[Callable[[Path], tuple[State, Callable[[State], object]]]]] = {
    "checkpoint/folder": [checkpoint],
    "data/blend/blending": [blend],
    "data/blend/packing": [packer],
    "data/blend/row_stream": [other_feed_of_a_blend],
    "data/feed/state": [feed],
    "data/store/store": [dataset],
    "estimators/fit/checkpoints": [run_of_checkpoints],
    "estimators/persistence": [estimator, model],
    "jobs/output": [result_of_job],
    "model/saved_model": [module],
    "tracking/kept_runs": [kept_run],
}
"""Functions that save something, by the module that reads it; each returns the content, and a function to read it."""

NOT_READ_LATER = {
    "bench/contenders/fit_clock": "read by the benchmark that has started it",
    "bench/report": "for people",
    "doctor/command": "for people",
    "launch/elastic/offers": "an invitation, which ends with its launch",
    "monitor/exports": "the state of a monitor, which ends with its process",
    "parallel/weights": "the index of Hugging Face",
    "planner/command": "for people",
}
"""Modules that write JSON without a format, and the reason."""


@pytest.mark.parametrize("save", [save for saves in READERS.values() for save in saves])
def test_higher_format_is_refused_with_the_advice_to_install_a_newer_sparkdl(save, tmp_path: Path) -> None:
    content, read = save(tmp_path)
    higher = content["format"] + 1
    said = rf"has format {higher}\b.* reads formats up to {content['format']}\. Install a newer sparkdl\."
    with pytest.raises(SparkdlError, match=said):
        read({**content, "format": higher})


def test_everything_that_is_saved_has_a_format_or_is_known_not_to_be_read_later() -> None:
    package = Path(sparkdl.__file__).parent
    sources = {
        str(path.relative_to(package).with_suffix("")): path.read_text()
        for folder in (package, package / "estimators")  # rglob does not follow the link to the estimators
        for path in folder.rglob("*.py")
    }
    readers = {name for name, text in sources.items() if re.search(r"\bcheck_(format|state)\(", text)}
    assert readers == {"checks", *READERS}
    writes = re.compile(r"\.write_whole\(|write_text\(json\b|json\.dump\(")
    assert {name for name, text in sources.items() if writes.search(text)} - readers == {*NOT_READ_LATER}
