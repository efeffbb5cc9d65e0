from __future__ import annotations

import json
import os

import pytest

from sparkdl.identity import differences
from sparkdl.jobs.identity import ROWS, identity_of, key_of_files
from sparkdl.jobs.imports import checksums, code_files
from sparkdl.jobs.output import FORMAT
from sparkdl.jobs.run_job import run_job
from tests.unit.jobs.job_files import read


def identity(folder, *arguments, **code) -> dict:
    return identity_of(read(folder, *arguments), {"my_nets.py": "#abc", **code})


def written(made: dict) -> dict:
    """The identity as read back from a file."""
    return json.loads(json.dumps(made))


@pytest.mark.parametrize(
    "argument",
    [
        *("output=/x", "spark.master=local[8]", "epochs=2", "seed=", "store=/x", "cache=memory"),
        *("monitor={seconds: 5}", "logCheckpoints=true", "stragglerFactor=2"),
    ],
)
def test_settings_that_do_not_affect_the_result_do_not_change_the_identity(tmp_path, argument):
    one, other = identity(tmp_path), identity(tmp_path, argument)
    assert one == other
    assert differences(written(one), other) == []


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("epochs=3", "params.epochs was 2 and is 3"),
        ("batchSize=64", "params.batchSize was not there and is 64"),
        ("epochs=", "params.epochs was 2 and is not there"),
        ("model.arguments.hidden=64", "model.arguments.hidden was 16 and is 64"),
        ("data.parquet=others", "data.parquet was 'rows' and is 'others'"),
        ("featuresCol=[a, b]", "params.featuresCol was 'image' and is ['a', 'b']"),
    ],
)
def test_changed_settings_of_a_job_are_named(tmp_path, argument, said):
    assert said in differences(written(identity(tmp_path)), identity(tmp_path, argument))


def test_password_of_the_tracking_server_is_not_in_the_identity(tmp_path):
    one, other = (
        identity(tmp_path, f"tracking={{uri: 'https://me:{password}@there'}}") for password in ("abc", "xyz")
    )
    assert one["tracking.uri"] == "https://there"
    assert one == other


def test_changed_code_and_changed_rows_are_another_job(tmp_path):
    one = identity(tmp_path)
    changed = identity(tmp_path, **{"my_nets.py": "#xyz"})
    assert differences(written(one), changed) == ["changed: the code in my_nets.py"]
    rows, more = {**one, ROWS: "#1"}, {**one, ROWS: "#2"}
    assert differences(written(rows), more) == ["changed: the rows or settings of spark.sql"]
    # Spark cannot always compare rows.
    assert differences(written(rows), one) == differences(written(one), rows) == []


def test_only_the_first_of_many_differences_are_named(tmp_path):
    changes = [
        f"{name}=17"
        for name in ("batchSize", "epochs", "predictionCol", "maxGradNorm", "seed", "warmupSteps")
    ]
    found = differences(written(identity(tmp_path)), identity(tmp_path, *changes))
    assert (len(found), found[-1]) == (6, "1 more")


def test_files_and_settings_have_a_key_without_spark(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows" / "a.parquet"

    def key(*arguments):
        return key_of_files(read(tmp_path, f"data.parquet={tmp_path / 'rows'}", *arguments))

    assert key() is None
    file.write_bytes(b"rows")
    first = key()
    assert key() == first != key("spark.config={spark.sql.ansi.enabled: true}")
    os.utime(file, ns=(1, 1))
    second = key()
    (tmp_path / "rows" / "b").touch()
    third = key()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.sql.ansi.enabled true")
    assert len({first, second, third, key()}) == 4
    assert key("data.sql=SELECT 1") is None
    assert key(f"data.test={tmp_path / 'nothing'}") is None


@pytest.mark.parametrize("is_known", [True, False])
def test_a_job_that_is_done_says_so_without_spark(tmp_path, is_known):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.parquet").touch()
    arguments = (f"data.parquet={tmp_path / 'rows'}", f"output={tmp_path / 'out'}")
    job = read(tmp_path, *arguments)
    made = {**identity_of(job, checksums(code_files(job))), ROWS: "#1" if is_known else None}
    (tmp_path / "out").mkdir()
    result = {"format": FORMAT, "job": made, "files": key_of_files(job), "ended": "yesterday"}
    (tmp_path / "out" / "result.json").write_text(json.dumps(result))
    said = []

    class StartedError(Exception):
        pass

    def start(_num_ranks):
        raise StartedError

    run_job(job, start, say=said.append, has_own_session=is_known)
    assert said[0].startswith("Already done at yesterday")
    assert ("cannot tell" in said[0]) != is_known
    with pytest.raises(StartedError):
        run_job(job, start, say=said.append, has_own_session=is_known, is_again=True)
    if is_known:
        (tmp_path / "rows" / "b.parquet").touch()
        with pytest.raises(StartedError):
            run_job(job, start, say=said.append, has_own_session=True)
