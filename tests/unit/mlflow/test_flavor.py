"""One logged model, loaded in three ways, on a real SQLite store."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
import torchmetrics
import yaml
from mlflow.exceptions import MlflowException
from packaging.version import Version
from torch import nn

import sparkdl.horovod.torch as hvd
import sparkdl.mlflow
from sparkdl.data import Column
from sparkdl.errors import ParamTypeError, SavedModelError
from sparkdl.estimators import TorchModel
from sparkdl.model.saved_model import SavedModel
from sparkdl.networks.images import ImageInputs
from tests.servers.fresh_mlflow import tracked
from tests.servers.mlflow_servers import python_for_serving
from tests.training.signatures import make_inputs, make_signature
from tests.unit.mlflow.model_examples import KINDS, WINE, expected, many_into_many, rows, wine_classifier

__all__ = ["tracked"]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An MLflow model in a folder, and the model from which it was made."""
    path = tmp_path_factory.mktemp("saved") / "model"
    model = many_into_many()
    sparkdl.mlflow.save_model(model, path, input_example=rows(2))
    return str(path), model


@pytest.fixture(scope="module")
def served(saved):
    return mlflow.pyfunc.load_model(saved[0])


def test_one_folder_loads_as_a_spark_model_a_module_and_a_pyfunc(saved, served):
    path, model = saved
    assert set(yaml.safe_load(Path(path, "MLmodel").read_text())["flavors"]) == {"python_function", "sparkdl"}
    loaded = sparkdl.mlflow.load_model(path)
    assert type(loaded) is TorchModel
    assert (loaded.uid, loaded.getPredictionCol()) == (model.uid, "guess")
    assert loaded.history == model.history
    assert loaded.summary.model_uri == path
    module = sparkdl.mlflow.load_module(path)
    assert not module.training
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name
    assert torch.equal(served._model_impl.get_raw_model().kind.weight, module.kind.weight)


def test_pyfunc_takes_tensors_and_ragged_arrays_and_returns_labels_and_probabilities(saved, served):
    frame = rows()
    answers = served.predict(frame)
    told = expected(saved[1].module, frame)
    assert list(answers.columns) == ["kind", "kind_probability", "place"]
    assert answers["kind"].tolist() == told["kind"].tolist()
    np.testing.assert_allclose(np.stack(answers["kind_probability"]), told["kind_probability"], rtol=1e-6)
    np.testing.assert_allclose(np.stack(answers["place"]), told["place"], rtol=1e-5, atol=1e-7)
    assert served.metadata.metadata["classes"] == {"kind": list(KINDS)}


def test_the_signature_names_columns_answers_and_params(served):
    signature = served.metadata.signature.to_dict()
    matrix = {"type": "array", "items": {"type": "array", "items": {"type": "double"}}}
    tokens: dict = {"type": "array", "items": {"type": "long"}}
    if hasattr(mlflow.types.schema, "AnyType"):
        matrix = tokens = {"type": "any"}
    assert json.loads(signature["inputs"]) == [
        {**matrix, "name": "matrix", "required": True},
        {**tokens, "name": "tokens", "required": True},
        {"type": "long", "name": "count", "required": True},
    ]
    names = [column["name"] for column in json.loads(signature["outputs"])]
    assert names == ["kind", "kind_probability", "place"]
    params = {param["name"]: (param["type"], param["default"]) for param in json.loads(signature["params"])}
    defaults = {"batch_size": ("long", 1024), "device": ("string", "cpu"), "allow_nan": ("boolean", False)}
    assert params == {**defaults, "output": ("string", "")}


def test_params_of_an_inference_choose_batches_and_device(served):
    sizes = []
    module = served._model_impl.get_raw_model()
    hook = module.register_forward_pre_hook(
        lambda module, arguments, named: sizes.append(len(named["count"])), with_kwargs=True
    )
    try:
        served.predict(rows(), params={"batch_size": 2})
    finally:
        hook.remove()
    assert sizes == [2, 2, 1]
    same = served.predict(rows(), params={"device": "cpu:0"})
    assert same["kind"].tolist() == served.predict(rows())["kind"].tolist()


def test_output_names_the_column_that_is_returned_as_an_array(saved, served):
    frame, told = rows(), expected(saved[1].module, rows())
    configured = mlflow.pyfunc.load_model(saved[0], model_config={"output": "kind"})
    for name, values in told.items():
        for model in (served, configured):
            array = model.predict(frame, params={"output": name})
            assert isinstance(array, np.ndarray)
            np.testing.assert_array_equal(array.shape, values.shape)
            assert pd.Series(list(array)).equals(pd.Series(list(served.predict(frame)[name])))
    assert configured.predict(frame).tolist() == told["kind"].tolist()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_evaluates_a_classifier_by_the_column_of_its_predictions(tracked):
    pytest.importorskip("sklearn")
    frame = pd.DataFrame([{**WINE, "alcohol": alcohol} for alcohol in np.linspace(0, 40, 12)])
    with mlflow.start_run():
        uri = sparkdl.mlflow.log_model(wine_classifier()).model_uri
        labels = mlflow.pyfunc.load_model(uri).predict(frame, params={"output": "prediction"})
        assert len(set(labels)) > 1
        found = mlflow.models.evaluate(
            uri,
            frame.assign(kind=labels),
            targets="kind",
            model_type="classifier",
            evaluators="default",
            evaluator_config={"log_model_explainability": False},
            model_config={"output": "prediction"},
        )
    assert (found.metrics["accuracy_score"], found.metrics["example_count"]) == (1.0, 12)


@pytest.mark.parametrize(
    ("frame", "params", "message"),
    [
        (rows(), {"output": "guess"}, "output is 'guess'. Give one of: kind, kind_probability, place"),
        (rows().drop(columns="tokens"), None, "missing inputs .'tokens'."),
        (rows().assign(count="many"), None, "count"),
        (rows().assign(matrix=[[[1.0, 2.0]]] * 5), None, "Row 0 of column 'matrix' has 2 values.* takes 6"),
        (rows().assign(tokens=[[1, None]] * 5), None, "tokens"),
        (
            rows().assign(tokens=[[99]] * 5),
            None,
            "RuntimeError: embedding_bag.* tokens int64 .* from 99 to 99",
        ),
        (rows().iloc[:0], None, "There are no rows to predict"),
        (rows(), {"batch_size": 0}, "batch_size is 0. Give a whole number"),
        (rows(), {"device": "tpu"}, "device is 'tpu'. Give 'cpu', 'cuda'"),
        (rows(), {"device": "cuda:77"}, "device is 'cuda:77', and this process sees"),
        (rows(), {"device": "meta"}, "device is 'meta', and this process sees"),
    ],
)
def test_bad_requests_raise_status_400_with_the_reason(served, frame, params, message):
    with pytest.raises(MlflowException, match=message) as caught:
        served.predict(frame, params=params)
    assert caught.value.get_http_status_code() == 400


@pytest.fixture(scope="module")
def served_wine(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("wine") / "model")
    sparkdl.mlflow.save_model(wine_classifier(), path, input_example=pd.DataFrame([WINE]))
    return mlflow.pyfunc.load_model(path)


FORMS = {
    "dataframe_split": lambda rows: pd.DataFrame(rows, dtype=object).to_dict("split"),
    "dataframe_records": list,
    "instances": list,
    "inputs": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "csv": lambda rows: pd.DataFrame(rows).to_csv(index=False),
}


def asked(served, form, rows):
    """Status and answer of MLflow's scoring server; the answer is parsed as strict JSON."""
    from mlflow.pyfunc import scoring_server

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    body, kind = FORMS[form](rows), "text/csv"
    if form != "csv":
        body, kind = json.dumps({form: body}), "application/json"
    try:
        answer = scoring_server.invocations(body, kind, served, served.metadata.get_input_schema())
    except MlflowException as error:
        return error.get_http_status_code(), error.message
    return answer.status, json.loads(answer.response, parse_constant=refuse)


@pytest.mark.skipif(
    not hasattr(mlflow.types.schema, "AnyType"),
    reason="MLflow before 2.19 refuses whole numbers in arrays of doubles",
)
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        # Every form daily with one kind, and every kind with one form.
        pytest.param(
            form, kind, marks=() if form == "dataframe_split" or kind == "nested" else pytest.mark.slow
        )
        for form in ("dataframe_split", "dataframe_records", "instances", "inputs")
        for kind in ("array", "nested", "ragged", "tokens")
    ],
)
def test_numbers_without_a_fraction_are_numbers_of_any_type(tmp_path, form, kind):
    ragged = {"kind": "ragged", "dtype": "object", "lengths": (None,)}
    column = {
        "array": Column(name="v", dtype="float64", shape=(2,)),
        "nested": Column(name="v", dtype="float32", shape=(1, 2)),
        "ragged": Column(name="v", element=("number", "float64"), **ragged),
        "tokens": Column(name="v", element=("number", "int64"), **ragged),
    }[kind]
    inputs = make_inputs("v", "x", v=column, dtypes=("float32", "float32"), padding_value=0.0)
    signature = replace(make_signature(), inputs=replace(inputs, prepare=sums_of, inputs=inputs.inputs[1:]))
    sparkdl.mlflow.save_model(TorchModel(SavedModel(nn.Identity(), signature)), tmp_path / "model")
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    whole, broken = ([1.0, 3], [5, 7.0]) if kind == "tokens" else ([1, 2], [1, 0.5])
    rows = [{"v": [value] if kind == "nested" else value, "x": 4} for value in (whole, broken)]
    status, answer = asked(served, form, rows)
    assert status == 200, answer
    assert [row["prediction"] for row in answer["predictions"]] == [sum(whole) + 4, sum(broken) + 4]
    for bad in (["a", 1], [None, 1], *([[0.5, 1]] if kind == "tokens" else [])):
        status, answer = asked(served, form, [{"v": [bad] if kind == "nested" else bad, "x": 4}, rows[0]])
        assert status == 400, answer


def sums_of(columns):
    return {"x": np.array([np.sum(row) for row in columns["v"]], np.float32) + columns["x"]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["ash", "magnesium", "region"])
def test_a_missing_value_is_a_bad_request_in_every_form(served_wine, form, name):
    if name == "region" and form in ("instances", "inputs"):
        pytest.skip("MLflow makes the string 'None' of a null in these forms before a model sees it")
    status, answer = asked(served_wine, form, [WINE, WINE])
    assert status == 200, answer
    assert len(answer["predictions"]) == 2
    status, answer = asked(served_wine, form, [WINE, {**WINE, name: None}, WINE, {**WINE, name: None}])
    assert status == 400, answer
    if name != "magnesium":  # for which MLflow's own error says that it is no integer
        assert f"'{name}' holds null or NaN in 2 of 4 rows" in answer
        assert "row 1" in answer


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
def test_missing_value_in_a_frame_has_the_error_code_of_a_bad_request(served_wine, missing):
    frame = pd.DataFrame([WINE] * 3)
    kind = object if missing is None else "Float64" if missing is pd.NA else float
    frame["ash"] = frame["ash"].astype(kind)
    frame.loc[2, "ash"] = missing
    said = {False: "'ash' holds null or NaN in 1 of 3 rows, .* row 2", True: "output is NaN for 1 of 3 rows"}
    for allow_nan, message in said.items():
        with pytest.raises(MlflowException, match=message) as caught:
            served_wine.predict(frame, params={"allow_nan": allow_nan})
        assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
        assert caught.value.get_http_status_code() == 400


@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_output_that_json_cannot_hold_is_a_bad_request(tmp_path, answer):
    module = nn.Linear(3, 1)
    with torch.no_grad():
        module.bias.fill_(answer)
    sparkdl.mlflow.save_model(TorchModel(SavedModel(module, make_signature((3,)))), tmp_path / "model")
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    status, told = asked(served, "dataframe_records", [{"x": [0.0, 1.0, 2.0]}])
    assert status == 400, told
    assert ("output is NaN for 1 of 1" if np.isnan(answer) else "is infinite in 1 of 1") in told


def run_python(python, code, *arguments, path=""):
    """The output of a program that runs with nothing but ``path`` on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=Path(python).parent,
        env={**environment, "PYTHONPATH": str(path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


WITHOUT_SPARK = """
import sys
sys.modules.update(dict.fromkeys(("pyspark", "py4j", "petastorm", "sparkdl._native")))  # as if not installed
import mlflow, sparkdl.mlflow
served = mlflow.pyfunc.load_model(sys.argv[1])
example = mlflow.models.Model.load(sys.argv[1]).load_input_example(sys.argv[1])
print(served.predict(example)["kind"].tolist() == sys.argv[2].split())
print(type(sparkdl.mlflow.load_module(sys.argv[1])).__name__)
try:
    sparkdl.mlflow.load_model(sys.argv[1])
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_only_the_spark_model_needs_pyspark_to_load(saved):
    path, model = saved
    kinds = " ".join(expected(model.module, rows(2))["kind"])
    predicted, module, why = run_python(sys.executable, WITHOUT_SPARK, path, kinds, path=ROOT)
    assert (predicted, module) == ("True", "ManyIntoMany")
    assert "needs pyspark" in why
    assert "mlflow.pyfunc.load_model(uri) predicts" in why


def test_a_logged_model_is_registered_with_an_alias_and_found_by_it(tracked):
    model = many_into_many()
    module_path = list(sys.path)
    with mlflow.start_run() as run:
        info = sparkdl.mlflow.log_model(
            model,
            input_example=rows(2),
            registered_model_name="animals",
            registered_model_alias="best",
            extra_pip_requirements=["pillow"],
        )
    assert info.run_id == run.info.run_id
    assert sys.path == module_path, "MLflow tries the model in a temporary folder"
    loaded = sparkdl.mlflow.load_model("models:/animals@best")
    assert torch.equal(loaded.module.kind.weight, model.module.kind.weight)
    with open(mlflow.pyfunc.get_model_dependencies(info.model_uri), encoding="utf-8") as file:
        names = {line.split("==")[0].strip() for line in file}
    assert {"torch", "safetensors", "pillow"} <= names
    assert not [name for name in names if "spark" in name]


def test_packages_of_the_network_and_of_its_inputs_are_requirements(tmp_path):
    column = Column(name="x", kind="binary", dtype="object")
    prepare = ImageInputs(column="x", kind="binary", size=(2, 2))
    inputs = make_inputs("x", x=column, dtypes=("uint8",), prepare=prepare)
    network = nn.Sequential(nn.Flatten(), torchmetrics.MeanMetric())
    model = TorchModel(SavedModel(network, replace(make_signature(), inputs=inputs)))
    sparkdl.mlflow.save_model(model, tmp_path / "model")
    lines = (tmp_path / "model" / "requirements.txt").read_text().splitlines()
    for package in ("pillow", "torchmetrics"):
        assert f"{package}=={version(package)}" in lines
    assert len(lines) == len({line.partition("==")[0] for line in lines}), "each once"


def test_a_model_that_is_logged_by_the_user_has_the_metrics_of_its_epoch(tracked):
    model = many_into_many()
    with mlflow.start_run() as run:
        info = sparkdl.mlflow.log_model(model)
    if mlflow.__version__ < "3":
        return
    (found,) = mlflow.search_logged_models(filter_string="metrics.loss < 1", output_format="list")
    assert (found.model_uri, found.source_run_id) == (info.model_uri, run.info.run_id)
    assert [(metric.key, metric.value, metric.step) for metric in found.metrics] == [("loss", 0.5, 1)]
    assert [output.step for output in mlflow.get_run(run.info.run_id).outputs.model_outputs] == [1]


def test_code_outside_of_packages_is_saved_with_the_model(tmp_path, monkeypatch):
    source = tmp_path / "layers_of_a_flavor_test.py"
    source.write_text("from torch import nn\nclass Twice(nn.Linear):\n    pass\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        layers = importlib.import_module(source.stem)
        model = TorchModel(SavedModel(layers.Twice(3, 1), make_signature((3,))))
        sparkdl.mlflow.save_model(model, tmp_path / "model", code_paths=[str(source)])
    sys.modules.pop(source.stem)
    source.unlink()
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = sparkdl.mlflow.load_module(tmp_path / "model")
    assert type(module).__name__ == "Twice"
    assert sys.modules.pop(source.stem).__file__.startswith(str(tmp_path / "model" / "code"))


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """A model saved with the code of its network, and a Python with all its requirements but without sparkdl."""
    folder = tmp_path_factory.mktemp("carried")
    code = folder / "tests" / "unit" / "mlflow"
    code.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "unit" / "mlflow" / "many_into_many.py", code)
    path = folder / "model"
    code_paths = [str(folder / "tests")]
    sparkdl.mlflow.save_model(many_into_many(), path, input_example=rows(2), code_paths=code_paths)
    return path, python_for_serving(folder / "environment")


def test_model_contains_sparkdl_and_does_not_require_it(carried):
    path, _ = carried
    described = yaml.safe_load((path / "MLmodel").read_text())["flavors"]["python_function"]
    assert (described["code"], described["loader_module"]) == ("code", "sparkdl_model_loader")
    wheel = f"sparkdl_torch-{sparkdl.__version__}-py3-none-any.whl"
    assert {entry.name for entry in (path / "code").iterdir()} == {wheel, "sparkdl_model_loader.py", "tests"}
    for name in ("requirements.txt", "conda.yaml", "python_env.yaml"):
        assert "spark" not in (path / name).read_text()
    with zipfile.ZipFile(path / "code" / wheel) as archive:
        names = archive.namelist()
        record = archive.read(f"sparkdl_torch-{sparkdl.__version__}.dist-info/RECORD").decode()
        assert archive.read("sparkdl/errors.py") == (ROOT / "sparkdl" / "errors.py").read_bytes()
    assert [line.split(",")[0] for line in record.splitlines()] == names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


WITHOUT_SPARKDL = """
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
print([name for name in ("sparkdl", "pyspark", "petastorm") if find_spec(name)])
import mlflow
served = mlflow.pyfunc.load_model(sys.argv[1])
example = mlflow.models.Model.load(sys.argv[1]).load_input_example(sys.argv[1])
print(served.predict(example)["kind"].tolist() == sys.argv[2].split())
import sparkdl.mlflow
from sparkdl.tracking.model_code import write_code
print(sparkdl.__file__)
print(version("sparkdl-torch"), type(sparkdl.mlflow.load_module(sys.argv[1])).__name__)
wheel, _ = write_code(Path(sys.argv[3]))
print(Path(wheel).read_bytes() == Path(sys.argv[1], "code", Path(wheel).name).read_bytes())
import pandas
print(mlflow.pyfunc.load_model(sys.argv[4]).predict(pandas.DataFrame({"x": [[1.0, 2.0, 3.0]]}))["prediction"][0])
from sparkdl.errors import TransportUnavailableError
try:
    import sparkdl.collective.native.communicator
except TransportUnavailableError as error:
    print(error)
"""


def test_models_predict_in_a_process_without_sparkdl(carried, tmp_path):
    """Also a model with layers of training, which need the extension in training alone."""
    path, python = carried
    module = nn.Sequential(nn.Linear(3, 4), hvd.SyncBatchNorm(4), nn.Linear(4, 1)).eval()
    sparkdl.mlflow.save_model(TorchModel(SavedModel(module, make_signature((3,)))), tmp_path / "model")
    kinds = " ".join(expected(many_into_many().module, rows(2))["kind"])
    told = run_python(python, WITHOUT_SPARKDL, path, kinds, tmp_path, tmp_path / "model")
    lacking, is_right, where, loaded, is_same, predicted, missing = told
    assert (lacking, is_right) == ("[]", "True")
    assert where.startswith(str(path / "code" / "sparkdl_torch-"))
    assert loaded == f"{sparkdl.__version__} ManyIntoMany"
    assert is_same == "True", "what is logged there carries the same modules"
    assert float(predicted) == pytest.approx(module(torch.tensor([[1.0, 2.0, 3.0]])).item(), rel=1e-5)
    assert "Install sparkdl from a wheel" in missing


STRANGER = """
import os, sys
import mlflow
for state in ("installed", "imported"):
    if os.fork() == 0:
        if state == "imported":
            import sparkdl
        try:
            print(type(mlflow.pyfunc.load_model(sys.argv[1])._model_impl).__module__, flush=True)
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_another_package_named_sparkdl_is_not_mistaken_for_it(carried, tmp_path):
    path, python = carried
    package = tmp_path / "sparkdl"
    package.mkdir()
    (package / "__init__.py").write_text("class HorovodRunner:\n    pass\n")
    installed, imported = run_python(python, STRANGER, path, path=tmp_path)
    assert installed == "sparkdl.mlflow.pyfunc"
    assert f"package of that name from {package}" in imported
    assert "pip uninstall sparkdl" in imported


def test_the_installed_sparkdl_is_used_before_the_carried_one(saved):
    before = {name: module for name, module in sys.modules.items() if name.startswith("sparkdl.")}
    served = mlflow.pyfunc.load_model(saved[0])
    assert type(served._model_impl) is sparkdl.mlflow.pyfunc.ServedModel
    assert not [entry for entry in sys.path if entry.endswith(".whl")]
    assert all(sys.modules[name] is module for name, module in before.items())


def test_a_model_without_carried_code_is_loaded_by_the_installed_sparkdl(saved, tmp_path):
    path = tmp_path / "older"
    shutil.copytree(saved[0], path)
    shutil.rmtree(path / "code")
    described = yaml.safe_load((path / "MLmodel").read_text())
    described["flavors"]["python_function"]["loader_module"] = "sparkdl.mlflow.pyfunc"
    del described["flavors"]["python_function"]["code"]
    (path / "MLmodel").write_text(yaml.safe_dump(described))
    frame = rows()
    found = mlflow.pyfunc.load_model(str(path)).predict(frame)
    assert found["kind"].tolist() == expected(saved[1].module, frame)["kind"].tolist()
    assert type(sparkdl.mlflow.load_model(str(path))) is TorchModel


def test_loaded_model_is_logged_again_with_its_code(saved, tmp_path):
    sparkdl.mlflow.save_model(sparkdl.mlflow.load_model(saved[0]), tmp_path / "again")
    first, again = (
        sorted(entry.name for entry in Path(folder, "code").iterdir() if entry.name != "__pycache__")
        for folder in (saved[0], tmp_path / "again")
    )
    assert first == again


def test_invalid_objects_to_log_or_load_are_named(tracked, tmp_path):
    with pytest.raises(ParamTypeError, match=r"takes a TorchModel, got torch\.nn"):
        sparkdl.mlflow.save_model(nn.Linear(1, 1), tmp_path / "model")
    with pytest.raises(ParamTypeError, match="alias is set, and registered_model_name is not"):
        sparkdl.mlflow.log_model(many_into_many(), registered_model_alias="best")
    other = {"loader_module": "json", "data_path": __file__, "pip_requirements": ["mlflow"]}
    mlflow.pyfunc.save_model(tmp_path / "other", **other)
    with pytest.raises(SavedModelError, match="not logged by sparkdl: its flavors are python_function"):
        sparkdl.mlflow.load_model(str(tmp_path / "other"))


@pytest.mark.skipif(mlflow.__version__ < "2.19", reason="MLflow takes such rows apart by their index")
@pytest.mark.skipif(
    Version("2.14") <= Version(mlflow.__version__) < Version("3"),
    reason="this MLflow gives columns of arrays an index of its own before a model sees them",
)
def test_answers_keep_the_index_of_their_rows(served):
    frame = rows(3).set_index(pd.Index(list("abc")))
    assert served.predict(frame).index.tolist() == list("abc")


def test_a_served_model_predicts_batches_of_the_models_own_size(tmp_path):
    model = TorchModel(SavedModel(nn.Linear(3, 1), make_signature((3,)))).setPredictionBatchSize(2)
    sparkdl.mlflow.save_model(model, tmp_path / "model")
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    defaults = {param.name: param.default for param in loaded.metadata.signature.params}
    assert defaults["batch_size"] == 2
    sizes = []
    loaded._model_impl.get_raw_model().register_forward_pre_hook(
        lambda module, arguments: sizes.append(len(arguments[0]))
    )
    loaded._model_impl.predict(pd.DataFrame({"x": np.zeros((3, 3)).tolist()}))
    assert sizes == [2, 1]
    assert sparkdl.mlflow.load_model(tmp_path / "model").saved.signature.batch_size == 2
