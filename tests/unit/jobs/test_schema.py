from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparkdl.cli import main
from sparkdl.jobs.job import read_job, read_prediction_job
from sparkdl.jobs.schema import job_schema
from sparkdl.jobs.yaml_tree import SECTIONS, read_tree

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

JOBS = re.findall(
    r"```yaml\n(data.*?)```",
    (Path(__file__).resolve().parents[3] / "docs" / "jobs.md").read_text(),
    flags=re.DOTALL,
)


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def read(text: str) -> Any:
    return read_tree(text, "job.yaml").plain()


@pytest.mark.parametrize("text", JOBS)
def test_jobs_of_the_docs_fit_the_schema(validator: Any, text: str) -> None:
    validator.validate(read(text))


def test_schema_has_the_sections_of_a_job(validator: Any) -> None:
    assert tuple(validator.schema["properties"]) == SECTIONS


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"params": {"epohcs": 3}}, ["params"]),
        ({"params": {"epochs": "many"}}, ["params", "epochs"]),
        ({"params": {"cache": "sometimes"}}, ["params", "cache"]),
        ({"params": {"trainStep": "steps:train"}}, ["params"]),  # of TorchEstimator, not of TorchClassifier
        ({"data": {"table": "a", "sql": "b"}}, ["data"]),
        ({"model": "XGBClassifier"}, ["model"]),
        ({"tracking": "sometimes"}, ["tracking"]),
        ({"outputs": "x"}, []),
        ({"data": {"table": "a", "test": {"table": "b", "sql": "c"}}}, ["data", "test"]),
        ({"predict": {"table": "a"}}, ["predict"]),
        ({"output": None}, []),
        ({"data": {"table": None}}, ["data"]),
        ({"model": {"import": None}}, ["model"]),
        ({"registry": {"alias": "a"}}, ["registry"]),
        ({"predict": {"table": "a", "output": "b", "mode": "update"}}, ["predict", "mode"]),
    ],
)
def test_schema_refuses_what_a_job_refuses(validator: Any, change: dict[str, Any], path: list[str]) -> None:
    job = {"data": {"table": "digits"}, "model": "TorchClassifier", "output": "x", **change}
    assert path in [list(error.absolute_path) for error in validator.iter_errors(job)]


@pytest.mark.parametrize("name", ["params", "spark", "tracking", "registry", "code", "predict"])
def test_a_section_or_key_without_a_value_counts_as_missing(
    validator: Any, tmp_path: Path, name: str
) -> None:
    text = """\
data: {table: digits, sql: null, validation: null, test: null}
model: {import: "nets:make", arguments: null}
output: x
params: {epochs: null, cache: null}
spark: {master: null, config: {spark.x: null}}
tracking: {mode: null}
registry: {alias: null}
"""
    for section in ("null", "{}" if name not in ("code", "predict") else "null"):
        lines = [line for line in text.splitlines() if not line.startswith(f"{name}:")]
        file = tmp_path / "job.yaml"
        file.write_text("\n".join([*lines, f"{name}: {section}"]))
        read_job(file)
        validator.validate(read(file.read_text()))
    (tmp_path / "job.yaml").write_text(
        "predict: {table: a, output: {table: b, parquet: null}, model: m}\ndata:\n"
    )
    read_prediction_job(tmp_path / "job.yaml")
    validator.validate(read((tmp_path / "job.yaml").read_text()))


def test_a_job_that_only_predicts_needs_no_training(validator: Any) -> None:
    assert validator.is_valid({"predict": {"table": "a", "output": {"table": "b"}, "model": "models:/net/1"}})
    assert not validator.is_valid({"data": {"table": "digits"}})


def test_params_of_an_imported_model_are_those_of_the_torch_estimator(validator: Any) -> None:
    job = {"data": {"table": "digits"}, "model": "nets:make", "output": "x"}
    assert validator.is_valid({**job, "params": {"trainStep": "steps:train"}})
    assert not validator.is_valid({**job, "params": {"hiddenSizes": [3]}})


def test_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
