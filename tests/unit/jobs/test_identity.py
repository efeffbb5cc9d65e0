from __future__ import annotations

import json

import pytest

from sparkdl.identity import differences
from sparkdl.jobs.identity import ROWS, identity_of
from tests.unit.jobs.job_files import read


def identity(folder, *arguments, **code) -> dict:
    return identity_of(read(folder, *arguments), {"my_nets.py": "#abc", **code})


def written(made: dict) -> dict:
    """The identity as read back from a file."""
    return json.loads(json.dumps(made))


@pytest.mark.parametrize(
    "argument", ["output=/x", "spark.master=local[8]", "epochs=2", "seed=", "store=/x", "cache=memory"]
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
