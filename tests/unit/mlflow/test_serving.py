"""``mlflow models serve`` in Pythons without Spark and sparkdl, called over HTTP, and the files of a container."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import requests

import sparkdl.mlflow
from tests.servers.mlflow_servers import (
    ROOT,
    environments_of_mlflow,
    python_for_serving,
    running,
    scoring_server,
)
from tests.unit.mlflow.model_examples import WINE, expected, many_into_many, rows, wine_classifier

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the saved model, as ``model``."""
    folder = tmp_path_factory.mktemp("serving")
    sparkdl.mlflow.save_model(many_into_many(), folder / "model", input_example=rows(2))
    return folder


@pytest.fixture(scope="module")
def ask(folder):
    """A function that sends a body to the server and returns status and answer."""
    modules = folder / "modules"
    modules.mkdir()
    (modules / "tests").symlink_to(ROOT / "tests")  # contains the network, but not sparkdl
    python = python_for_serving(folder / "environment")
    with scoring_server(python, str(folder / "model"), folder, modules) as server:
        yield lambda body: send(server, body)


def send(server, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = requests.post(
        f"{server.url}/invocations", data=content, headers={"Content-Type": "application/json"}, timeout=500
    )
    return answer.status_code, json.loads(answer.text, parse_constant=refuse)


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


def records(**changes):
    return {"dataframe_records": [{**row, **changes} for row in rows(2).to_dict("records")]}


@pytest.mark.parametrize("form", ["example", "records", "with params"])
def test_a_server_answers_the_input_example_and_other_forms(ask, folder, form):
    body = {
        "example": json.loads((folder / "model" / "serving_input_example.json").read_text()),
        "records": records(),
        "with params": {**records(), "params": {"batch_size": 1, "device": "cpu"}},
    }[form]
    status, answer = ask(body)
    assert status == 200, answer
    told = expected(many_into_many().module, rows(2))
    assert [prediction["kind"] for prediction in answer["predictions"]] == told["kind"].tolist()
    for name in ("kind_probability", "place"):
        for prediction, row in zip(answer["predictions"], told[name], strict=True):
            assert prediction[name] == pytest.approx(row.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"dataframe_records": rows(2).drop(columns="tokens").to_dict("records")}, "inputs ['tokens']"),
        (records(count="many"), "Failed to convert column count to type 'int64'"),
        (records(tokens=["a"]), "Column 'tokens' holds values that are not numbers, such as 'a'"),
        (records(tokens=3), "Row 0 of column 'tokens' has the shape (), and the model takes lists"),
        (records(matrix=None), "Column 'matrix' holds null or NaN in 2 of 2 rows"),
        (records(matrix=[[1.0, 2.0]]), "Row 0 of column 'matrix' has 2 values, and the model takes 6"),
        (records(tokens=[99]), "The model failed with RuntimeError: embedding_bag: Expected idx"),
        ({"dataframe_records": []}, "missing inputs ['matrix', 'tokens', 'count']"),
        ({"dataframe_split": {"columns": list(rows(1)), "data": []}}, "There are no rows to predict"),
        (b"no json {", "Ensure that input is a valid JSON formatted string"),
        (b"\xff\xfe", "Ensure that input is a valid JSON formatted string"),
        ([1, 2], "Received a list"),
        ({"rows": []}, "exactly one of the input fields"),
        ({**records(), "params": {"batch_size": 0}}, "The param batch_size is 0"),
        ({**records(), "params": {"batch_size": "two"}}, "batch_size"),
        ({**records(), "params": {"device": "cuda:99"}}, "this process sees"),
    ],
)
def test_a_bad_request_gets_a_400_that_says_what_is_wrong(ask, body, message):
    status, answer = ask(body)
    assert status == 400, answer
    assert message in answer["message"], answer["message"]


def test_the_files_of_a_container_are_generated(folder):
    there = folder / "container"
    command = ["models", "generate-dockerfile", "-m", str(folder / "model"), "-d", str(there)]
    command = [sys.executable, "-m", "mlflow", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=folder)
    assert done.returncode == 0, done.stderr
    dockerfile = (there / "Dockerfile").read_text()
    assert "java" not in dockerfile.lower()
    assert "/opt/ml/model" in dockerfile
    (path,) = (there / "model_dir").rglob("requirements.txt")  # its folder depends on the version of MLflow
    requirements = path.read_text().splitlines()
    assert not [line for line in requirements if "spark" in line]
    (wheel,) = (there / "model_dir").rglob("sparkdl_torch-*.whl")
    assert wheel.parent.name == "code"


@pytest.fixture(scope="module")
def wine(tmp_path_factory):
    path = tmp_path_factory.mktemp("wine") / "model"
    sparkdl.mlflow.save_model(wine_classifier(), path, input_example=pd.DataFrame([WINE]))
    return path


@pytest.mark.timeout(1700)
@pytest.mark.parametrize("manager", ["virtualenv", "uv"])
def test_a_model_is_served_in_an_environment_made_of_its_requirements(wine, tmp_path, manager):
    environment = environments_of_mlflow(tmp_path, manager)
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(wine), "-p", "0"]
    with running([*command, "--env-manager", manager], environment, tmp_path, timeout_s=1500) as server:
        status, answer = send(server, {"dataframe_records": [WINE]})
    assert status == 200, answer
    packages = [path.name for path in tmp_path.rglob("site-packages/*")]
    assert [name for name in packages if name.startswith("torch-2")]
    assert not [name for name in packages if "spark" in name]
    shutil.rmtree(tmp_path / "environments")  # a gigabyte
