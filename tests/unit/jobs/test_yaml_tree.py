from __future__ import annotations

import math

import pytest

from sparkdl.errors import JobFileError
from sparkdl.jobs.yaml_tree import SECTIONS, apply_overrides, read_override, read_tree, write_tree
from tests.unit.jobs.job_files import JOB

FILE = "job.yaml"


def plain(text: str) -> object:
    return read_tree(text, FILE).plain()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("3", 3),
        ("-17", -17),
        ("010", 10),
        ("1e-3", 0.001),
        ("5e3", 5000.0),
        ("+.5", 0.5),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("12:30:15", "12:30:15"),
        ("2026-01-01", "2026-01-01"),
        ("0o17", 15),
        ("0x1f", 31),
        ("1_000", "1_000"),
        ("0b101", "0b101"),
        ("=", "="),
        ("<<", "<<"),
        ("my_models:make_net", "my_models:make_net"),
        ("'3'", "3"),
        ('"null"', "null"),
    ],
)
def test_plain_scalars_follow_yaml_1_2(word: str, value: object) -> None:
    assert plain(f"key: {word}") == {"key": value}
    assert type(plain(word)) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    tree = read_tree("a:\n  b: 1\n  c:\n  - x\n  - y\n\nd: {e: 2}\n", FILE)
    inner = tree.value["a"].value
    assert inner["b"].position == "job.yaml:2"
    assert [entry.position for entry in inner["c"].value] == ["job.yaml:4", "job.yaml:5"]
    assert tree.value["d"].value["e"].position == "job.yaml:7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml: the file is empty."),
        ("# nothing\n", "job.yaml: the file is empty."),
        ("a: 1\nb: [1, 2\nc: 3\n", "job.yaml:3: this is not YAML: while parsing a flow sequence"),
        ("a: 1\n\tb: 2\n", "job.yaml:2: this is not YAML: "),
        ("a: 1\n---\nb: 2\n", "job.yaml:2: this is not YAML: expected a single document"),
        ("a: \x07", "job.yaml: this is not YAML: unacceptable character"),
        ("a: 1\nb: 2\na: 3\n", "job.yaml:3: the key 'a' is already at job.yaml:1."),
        (
            "a: 1\nb: !!python/name:os.system x\n",
            "job.yaml:2: the tag !!python/name:os.system has no meaning",
        ),
        ("a: !!int x\n", "job.yaml:1: the tag !!int has no meaning"),
        ("a: !!str 3\n", "job.yaml:1: the tag !!str has no meaning"),
        ("a: !!binary '*'\n", "job.yaml:1: the tag !!binary has no meaning"),
        ("a: 1\nb: !!set {x}\n", "job.yaml:2: the tag !!set has no meaning"),
        ("a: !!omap [x: 1]\n", "job.yaml:1: the tag !!omap has no meaning"),
        ("a: !!map {x: 1}\n", "job.yaml:1: the tag !!map has no meaning"),
        ("!!str a: 1\n", "job.yaml:1: the tag !!str has no meaning"),
        ("a: !<int> x\n", "job.yaml:1: the tag "),
        ("a: !secret x\n", "job.yaml:1: the tag !secret has no meaning in a job file. Remove it."),
        ("? [1]\n: 2\n", "job.yaml:1: a key must be a word, and this is a list or a mapping."),
        ("a: &x\n  b: *x\n", "job.yaml:2: an alias is used inside its own anchor."),
    ],
)
def test_invalid_files_are_errors_with_the_line(text: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        read_tree(text, FILE)
    assert str(caught.value).startswith(message)


def test_a_text_that_calls_itself_yaml_1_1_is_read_alike() -> None:
    assert plain("%YAML 1.1\n---\na: off\nb: 010\n") == {"a": "off", "b": 10}


def test_alias_has_the_value_of_its_anchor() -> None:
    assert plain("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}


def test_aliases_of_aliases_take_no_time() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    assert "a59" in read_tree("\n".join(lines), FILE).value


def changed(*arguments: str, text: str = JOB) -> dict:
    tree = apply_overrides(read_tree(text, FILE), [read_override(argument) for argument in arguments])
    return tree.plain()


def before() -> dict:
    return read_tree(JOB, FILE).plain()


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


@pytest.mark.parametrize(
    "arguments", [("data.table=sales", "data.parquet="), ("data.parquet=", "data.table=sales")]
)
def test_removing_a_source_of_rows_leaves_the_other(arguments: tuple[str, ...]) -> None:
    after = changed(*arguments)["data"]
    assert {key: value for key, value in after.items() if value} == {"table": "sales", "validation": 0.2}


def test_last_argument_wins() -> None:
    assert changed("epochs=3", "epochs=4")["params"]["epochs"] == 4


def test_order_of_arguments_for_different_keys_does_not_matter() -> None:
    arguments = ["epochs=1", "batchSize=2", "seed=3"]
    assert changed(*reversed(arguments)) == changed(*arguments)


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


def test_written_values_are_read_again_in_their_order():
    content = {
        "model": "TorchClassifier",
        "params": {"hiddenSizes": [8, 3], "epochs": 3, "rate": 1e-3, "a": None},
    }
    content |= {"tracking": "off", "output": "yes: no"}
    text = write_tree(content)
    assert plain(text) == content
    assert list(plain(text)) == list(content)
