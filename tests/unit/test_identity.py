"""Identities have one digest exactly if nothing differs, and differences are named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.identity import checksum, differences, digest

NAMES = st.sampled_from(["epochs", "batchSize", "seed", "labelCol", "hiddenSizes"])
VALUES = st.integers() | st.text(alphabet="abc") | st.lists(st.integers(), max_size=3) | st.booleans()


@given(st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES))
def test_identities_have_one_digest_exactly_if_nothing_differs(one: dict, other: dict) -> None:
    assert (digest(one) == digest(other)) == (differences(json.loads(json.dumps(one)), other) == [])


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"seed": 0}, {"seed": False}, ["seed was 0 and is False"]),
        ({"seed": 1}, {}, ["seed was 1 and is not there"]),
        ({}, {"seed": 1}, ["seed was not there and is 1"]),
        ({"files": "#0123"}, {}, ["files was there and is not there"]),
        ({"rows": checksum(b"a")}, {"rows": checksum(b"b")}, ["changed: rows"]),
        ({"rows": None}, {"rows": checksum(b"b")}, []),
        ({"sizes": (1, 2)}, {"sizes": [1, 2]}, []),
        ({"files": {"a": 1, "b": 2}}, {"files": {"a": 1, "b": 3}}, ["files: b was 2 and is 3"]),
        ({"files": {"a": 1}}, {"files": "none"}, ["files was {'a': 1} and is 'none'"]),
        (
            dict.fromkeys("abcdefg", 1),
            dict.fromkeys("abcdefg", 2),
            [*(f"{name} was 1 and is 2" for name in "abcde"), "2 more"],
        ),
    ],
)
def test_differences_are_named(before: dict, now: dict, found: list[str]) -> None:
    assert differences(before, now) == found
