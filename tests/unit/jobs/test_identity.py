from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.jobs.identity import Identity, identity_of
from tests.unit.jobs.job_files import read


def identity(folder, *arguments, **code) -> Identity:
    return identity_of(read(folder, *arguments), {"my_nets.py": "abc", **code})


def written(made: Identity) -> dict:
    """The identity as read back from a file."""
    return json.loads(json.dumps(asdict(made)))


@pytest.mark.parametrize(
    "argument", ["output=/x", "spark.master=local[8]", "epochs=2", "seed=", "store=/x", "cache=memory"]
)
def test_settings_that_do_not_affect_the_result_do_not_change_the_identity(tmp_path, argument):
    one, other = identity(tmp_path), identity(tmp_path, argument)
    assert one.digest == other.digest
    assert other.differences(written(one)) == []


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("epochs=3", "params.epochs was 2 and is 3"),
        ("batchSize=64", "params.batchSize was not there and is 64"),
        ("epochs=", "params.epochs was 2 and is not there"),
        ("model.arguments.hidden=64", "model.arguments.hidden was 16 and is 64"),
        ("data.parquet=others", 'data.parquet was "rows" and is "others"'),
        ("featuresCol=[a, b]", 'params.featuresCol was "image" and is ["a", "b"]'),
    ],
)
def test_changed_settings_of_a_job_are_named(tmp_path, argument, said):
    one, other = identity(tmp_path), identity(tmp_path, argument)
    assert one.digest != other.digest
    assert said in other.differences(written(one))


def test_password_of_the_tracking_server_is_not_in_the_identity(tmp_path):
    one, other = (
        identity(tmp_path, f"tracking={{uri: 'https://me:{password}@there'}}") for password in ("abc", "xyz")
    )
    assert one.said["tracking.uri"] == "https://there"
    assert one.digest == other.digest


def test_changed_code_and_changed_rows_are_another_job(tmp_path):
    one = identity(tmp_path)
    changed = identity(tmp_path, **{"my_nets.py": "xyz"})
    assert changed.differences(written(one)) == ["the code in my_nets.py has changed"]
    rows = Identity(said=one.said, code=one.code, rows="1")
    more = Identity(said=one.said, code=one.code, rows="2")
    assert more.differences(written(rows)) == ["the rows or settings of spark.sql have changed"]
    # Spark cannot always compare rows.
    assert one.differences(written(rows)) == rows.differences(written(one)) == []


def test_only_the_first_of_many_differences_are_named(tmp_path):
    changes = [
        f"{name}=17"
        for name in ("batchSize", "epochs", "predictionCol", "maxGradNorm", "seed", "warmupSteps")
    ]
    found = identity(tmp_path, *changes).differences(written(identity(tmp_path)))
    assert (len(found), found[-1]) == (6, "1 more")


NAMES = st.sampled_from(["epochs", "batchSize", "seed", "labelCol", "hiddenSizes"])
VALUES = st.integers() | st.text(alphabet="abc") | st.lists(st.integers(), max_size=3) | st.booleans()


@given(st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES))
def test_jobs_have_one_hash_exactly_if_nothing_differs(one, other):
    first, second = Identity(said=one, code={}), Identity(said=other, code={})
    assert (first.digest == second.digest) == (second.differences(written(first)) == [])
