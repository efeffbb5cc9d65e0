from __future__ import annotations

import pytest

from sparkdl.errors import JobFileError
from sparkdl.jobs.job import read_job, read_prediction_job
from sparkdl.jobs.yaml_tree import read_override
from tests.unit.jobs.job_files import JOB, read, write_job


def test_job_has_source_model_params_and_output(tmp_path):
    job = read(tmp_path)
    assert (job.data.kind, job.data.value) == ("parquet", ("rows",))
    assert (job.output, job.estimator) == ("out", "TorchEstimator")
    assert {name: entry.plain() for name, entry in job.params.items()} == {
        "optimizer": {"import": "torch.optim:SGD", "arguments": {"lr": 0.5}},
        "loss": "torch.nn:CrossEntropyLoss",
        "featuresCol": "image",
        "labelCol": "digit",
        "cache": "off",
        "epochs": 2,
        "validationFraction": 0.2,
        "tracking": "off",
    }


def test_validation_is_a_share_or_a_column(tmp_path):
    assert "validationFraction" in read(tmp_path).params
    assert read(tmp_path, "data.validation=is_test").params["validationIndicatorCol"].value == "is_test"


def test_test_rows_are_of_the_kind_of_the_rows_unless_they_name_their_own(tmp_path):
    assert read(tmp_path).test is None
    for argument, kind, value in (
        ("data.test=[a, b]", "parquet", ("a", "b")),
        ("data.test={sql: SELECT 1}", "sql", "SELECT 1"),
        ("data.test.table=t", "table", "t"),
    ):
        test = read(tmp_path, argument).test
        assert (test.kind, test.value) == (kind, value)
    with pytest.raises(JobFileError, match="data.test has no key 'parqet'. Did you mean parquet"):
        read(tmp_path, "data.test={parqet: a}")


def prediction(folder, *arguments, text=f"{JOB}predict: {{parquet: new, output: scored}}\n"):
    return read_prediction_job(write_job(folder, text), [read_override(argument) for argument in arguments])


def test_a_prediction_has_rows_a_model_and_an_output(tmp_path):
    job = prediction(tmp_path, "predict.params.probabilityCol=p", "predict.columns=[a, b]")
    assert (job.data.kind, job.data.value, job.model, job.output) == ("parquet", ("new",), "out", "scored")
    assert (job.is_table, job.mode, job.columns, job.params) == (
        False,
        "error",
        ("a", "b"),
        {"probabilityCol": "p"},
    )
    assert len(job.entries) == 7
    alone = "predict: {table: rows, output: {table: scored}, model: 'models:/net/1', mode: append}\n"
    job = prediction(tmp_path, "predict.sql=SELECT 1", text=alone)
    assert (job.data.kind, job.model, job.output, job.is_table) == ("sql", "models:/net/1", "scored", True)
    assert read(tmp_path).content == read(tmp_path, "predict={parquet: new, output: scored}").content


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("predict=", "predict is missing; give the rows"),
        ("predict.mode=update", "predict.mode: takes error, overwrite, append, got 'update'"),
        ("predict.output=", "predict.output: takes the path"),
        ("predict.output={parquet: a, table: b}", "predict.output: takes the path"),
        ("predict.parquet=", "predict: takes one of table, parquet, sql, got none"),
        ("predict.colums=a", "predict has no key 'colums'. Did you mean columns"),
        ("output=", "predict: model is missing; give the output of a training job"),
    ],
)
def test_a_prediction_that_cannot_work_is_refused_with_its_key(tmp_path, argument, message):
    with pytest.raises(JobFileError, match=message):
        prediction(tmp_path, argument)


def test_tracking_registry_and_spark_are_read_in_short_and_long_forms(tmp_path):
    job = read(
        tmp_path,
        "tracking={mode: on, uri: 'http://there:5000'}",
        "registry=digits",
        "spark={master: 'local[3]', config: {spark.sql.ansi.enabled: true, spark.task.cpus: 1}}",
    )
    assert job.tracking_uri == "http://there:5000"
    assert job.params["registeredModelName"].value == "digits"
    assert job.spark.master == "local[3]"
    assert job.spark.config == {"spark.sql.ansi.enabled": "true", "spark.task.cpus": "1"}


def test_spark_is_not_part_of_the_content(tmp_path):
    assert read(tmp_path, "spark.master=local[7]").content == read(tmp_path).content


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("data:", "dta:", ":1: a job has no key 'dta'. Did you mean data?"),
        ("  parquet: rows", "  parquett: rows", ":2: data has no key 'parquett'. Did you mean parquet?"),
        (
            "  parquet: rows",
            "  table: a\n  sql: b",
            ":3: data.sql: takes one of table, parquet, sql, got tab",
        ),
        ("  parquet: rows", "  # nothing", ":1: data: takes one of table, parquet, sql, got none."),
        (
            "  parquet: rows",
            "  parquet: [rows, 3]",
            ":2: data.parquet: takes a text or a list of texts, got a list.",
        ),
        ("  parquet: rows", "  table: 3", ":2: data.table: takes a text, got 3."),
        ("  validation: 0.2", "  validation: true", ":3: data.validation: takes a text, got True."),
        (
            "  import: my_nets:make_net",
            "  import: my_nets",
            ":5: model.import: takes MODULE:NAME, as my_models:make_net",
        ),
        (
            "    hidden: 16",
            "    hidden: 16\n  argumens: 3",
            ":8: model has no key 'argumens'. Did you mean arguments?",
        ),
        (
            "  epochs: 2",
            "  epochs: 2\n  model: x:y",
            ":17: params.model: is set by the section model of the job.",
        ),
        (
            "  epochs: 2",
            "  validationFraction: 0.1",
            ":16: params.validationFraction: is set twice, also by data.validation",
        ),
        ("tracking: off", "tracking: of", ":17: tracking.mode: takes auto, on, off, got 'of'."),
        ("tracking: off", "tracking: [off]", ":17: tracking: takes a mapping of keys to values, got a list."),
        (
            "tracking: off",
            "registry: {alias: best}",
            ":17: registry.alias: is for a version of a registered model, and registry",
        ),
        (
            "tracking: off",
            "spark: {config: {a: [1]}}",
            ":17: spark.config.a: takes a plain value, got a list.",
        ),
        ("output: out", "output:", ":1: output is missing; give a path or URL for model and result."),
        ("output: out", "output: {a: b}", ":18: output: takes a text, got a mapping."),
    ],
    ids=lambda value: value.strip() if isinstance(value, str) else "",
)
def test_invalid_values_are_errors_with_file_line_and_key(tmp_path, line, instead, message):
    assert f"{line}\n" in JOB
    with pytest.raises(JobFileError) as caught:
        read(tmp_path, text=JOB.replace(f"{line}\n", f"{instead}\n"))
    assert str(caught.value).startswith(f"{tmp_path / 'job.yaml'}{message}")


def test_a_model_is_an_import_path_or_the_name_of_an_estimator(tmp_path):
    assert read(tmp_path, "model=TorchClassifier").estimator == "TorchClassifier"
    assert read(tmp_path, "model=my_nets:net").estimator == "TorchEstimator"
    with pytest.raises(JobFileError, match=r"nor an estimator\. Did you mean TorchRegressor\?"):
        read(tmp_path, "model=torchregressor")
    with pytest.raises(JobFileError, match="For the estimator TextClassifier write model: TextClassifier"):
        read(tmp_path, "model={import: TextClassifier}")
    with pytest.raises(JobFileError, match="model is missing; .* such as my_models:make_net"):
        read(tmp_path, "model=")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(JobFileError, match=r"nowhere.yaml cannot be read: No such file or directory\."):
        read_job(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobFileError, match="it is not UTF-8"):
        read_job(tmp_path / "binary.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(JobFileError, match=r"list.yaml:1: a job is a mapping .* got a list\."):
        read_job(tmp_path / "list.yaml")
