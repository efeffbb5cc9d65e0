from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import JobFileError
from sparkdl.jobs.yaml_tree import SECTIONS, Position, apply_overrides, read_override, read_tree
from tests.unit.jobs.job_files import JOB


def changed(*arguments: str, text: str = JOB) -> dict:
    tree = apply_overrides(read_tree(text, Position("job.yaml")), [read_override(each) for each in arguments])
    return tree.plain()


def before() -> dict:
    return read_tree(JOB, Position("job.yaml")).plain()


@pytest.mark.parametrize(
    ("argument", "keys", "value"),
    [
        ("epochs=3", ("params", "epochs"), 3),
        ("hiddenSizes=[64, 32]", ("params", "hiddenSizes"), [64, 32]),
        ("model.arguments.hidden=64", ("model", "arguments", "hidden"), 64),
        ("params.optimizer.arguments.lr=1e-2", ("params", "optimizer", "arguments", "lr"), 0.01),
        ("optimizer.arguments.momentum=0.9", ("params", "optimizer", "arguments", "momentum"), 0.9),
        ("model=TorchClassifier", ("model",), "TorchClassifier"),
        ("output=s3://bucket/a=b", ("output",), "s3://bucket/a=b"),
        ("tracking.experiment=nightly", ("tracking", "experiment"), "nightly"),
        ("spark.config.spark.driver.memory=4g", ("spark", "config", "spark.driver.memory"), "4g"),
        ("loss={import: torch.nn:NLLLoss}", ("params", "loss"), {"import": "torch.nn:NLLLoss"}),
        ("validation=", ("params", "validation"), None),
    ],
)
def test_argument_replaces_one_value(argument: str, keys: tuple, value: object) -> None:
    after, was = changed(argument), before()
    inner = after
    for key in keys:
        inner = inner[key]
    assert inner == value
    for name in SECTIONS:
        if name != keys[0]:
            assert after.get(name) == was.get(name)


def test_short_form_becomes_a_mapping_if_an_argument_sets_a_key_below_it() -> None:
    assert changed("tracking.uri=http://there:5000")["tracking"] == {
        "mode": "off",
        "uri": "http://there:5000",
    }
    text = "model: my_nets:make_net\nparams: {optimizer: 'torch.optim:SGD'}\n"
    after = changed("model.arguments.hidden=3", "optimizer.arguments.lr=0.1", text=text)
    assert after["model"] == {"import": "my_nets:make_net", "arguments": {"hidden": 3}}
    assert after["params"]["optimizer"] == {"import": "torch.optim:SGD", "arguments": {"lr": 0.1}}


def test_one_source_of_rows_replaces_another() -> None:
    assert changed("data.table=sales")["data"] == {
        "parquet": None,
        "table": "sales",
        "sql": None,
        "validation": 0.2,
    }


def test_last_argument_wins() -> None:
    assert changed("epochs=3", "epochs=4")["params"]["epochs"] == 4


@given(st.lists(st.sampled_from(["epochs", "batchSize", "seed"]), unique=True, min_size=2), st.randoms())
def test_order_of_arguments_for_different_keys_does_not_matter(names: list[str], random) -> None:
    arguments = [f"{name}={index}" for index, name in enumerate(names)]
    mixed = list(arguments)
    random.shuffle(mixed)
    assert changed(*mixed) == changed(*arguments)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("epochs", "the argument 'epochs' is not of the form KEY=VALUE, as epochs=3"),
        ("=3", "the argument '=3' is not of the form KEY=VALUE"),
        ("model..hidden=3", "the argument 'model..hidden=3' is not of the form KEY=VALUE"),
        ("dat.table=x", "the argument 'dat.table=x': a job has no 'dat'. Did you mean data?"),
        ("epochs=[3", "the argument 'epochs=[3': this is not YAML"),
        (
            "output.folder=x",
            "the argument 'output.folder=x': output is 'out', which has no 'folder' below it.",
        ),
        (
            "params.epochs.x=3",
            "the argument 'params.epochs.x=3': params.epochs is 2, which has no 'x' below it.",
        ),
    ],
)
def test_invalid_arguments_are_quoted_in_errors(argument: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        changed(argument)
    assert str(caught.value).startswith(message)
