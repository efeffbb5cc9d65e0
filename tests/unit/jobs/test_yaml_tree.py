from __future__ import annotations

import math
from contextlib import suppress

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import JobFileError
from sparkdl.jobs.yaml_tree import Position, read_tree

JOB = Position("job.yaml")


def plain(text: str) -> object:
    return read_tree(text, JOB).plain()


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
        ("1_000", "1_000"),
        ("my_models:make_net", "my_models:make_net"),
        ("'3'", "3"),
        ('"null"', "null"),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2(word: str, value: object) -> None:
    assert plain(f"key: {word}") == {"key": value}
    assert type(plain(word)) is type(value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_output_of_pyyaml_is_read_back(value: object) -> None:
    assert plain(yaml.safe_dump(value)) == value


def test_every_key_and_item_has_its_line() -> None:
    tree = read_tree("a:\n  b: 1\n  c:\n  - x\n  - y\n\nd: {e: 2}\n", JOB)
    inner = tree.value["a"].value
    assert str(inner["b"].position) == "job.yaml:2"
    assert [str(each.position) for each in inner["c"].value] == ["job.yaml:4", "job.yaml:5"]
    assert str(tree.value["d"].value["e"].position) == "job.yaml:7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml: the file is empty."),
        ("# nothing\n", "job.yaml: the file is empty."),
        ("a: 1\nb: [1, 2\nc: 3\n", "job.yaml:3: this is not YAML: while parsing a flow sequence"),
        ("a: 1\n\tb: 2\n", "job.yaml:2: this is not YAML: "),
        ("a: 1\n---\nb: 2\n", "job.yaml:2: this is not YAML: expected a single document"),
        ("a: \x07", "job.yaml: this is not YAML: unacceptable character"),
        ("a: 1\nb: 2\na: 3\n", "job.yaml:3: the key 'a' is already in line 1."),
        (
            "a: 1\nb: !!python/name:os.system x\n",
            "job.yaml:2: the tag !!python/name:os.system has no meaning",
        ),
        ("a: !secret x\n", "job.yaml:1: the tag !secret has no meaning in a job file. Remove it."),
        ("? [1]\n: 2\n", "job.yaml:1: a key must be a word, and this is a list or a mapping."),
        ("a: &x\n  b: *x\n", "job.yaml:2: an alias is used inside its own anchor."),
    ],
)
def test_invalid_files_are_errors_with_the_line(text: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        read_tree(text, JOB)
    assert str(caught.value).startswith(message)


def test_alias_has_the_value_of_its_anchor() -> None:
    assert plain("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}


def test_aliases_of_aliases_take_no_time() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    assert "a59" in read_tree("\n".join(lines), JOB).value


@given(st.text())
def test_any_text_is_read_or_raises_a_job_file_error(text: str) -> None:
    with suppress(JobFileError):
        read_tree(text, JOB)
