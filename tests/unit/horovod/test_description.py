"""The properties of requests on which ranks must agree, and the errors if they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkdl.horovod.torch.engine.request import Description, Kind, find_mismatch, parse_description

REDUCTION = Description(
    kind=Kind.ALLREDUCE, name="allreduce.w", dtypes=("float32",), shapes=((2, 3),), op=0, prescale=0.5
)
GATHERING = Description(kind=Kind.ALLGATHER, name="allgather.w", dtypes=("int64",), shapes=((4, 3),))


def test_descriptions_travel_as_text() -> None:
    for description in (REDUCTION, GATHERING, Description(kind=Kind.BARRIER, name="barrier")):
        assert parse_description(description.text) == description
        assert "\n" not in replace(description, name="two\nlines").text


def test_labels_are_short_and_readable() -> None:
    assert REDUCTION.label == "allreduce.w ALLREDUCE float32[2, 3] op=0 scales=0.5,1.0"
    many = replace(REDUCTION, dtypes=("float32",) * 100, shapes=((2, 3),) * 100)
    assert "100 tensors" in many.label
    assert len(many.label) < 120
    assert replace(many, shapes=((2, 3),) * 99 + ((3, 2),)).label != many.label


@pytest.mark.parametrize(
    "other",
    [
        replace(REDUCTION, dtypes=("float64",)),
        replace(REDUCTION, shapes=((3, 2),)),
        replace(REDUCTION, op=1),
        replace(REDUCTION, prescale=0.25),
        replace(REDUCTION, kind=Kind.ADASUM),
        replace(REDUCTION, root=0, root_rank=0),
        replace(REDUCTION, dtypes=("float32",) * 2, shapes=((2, 3),) * 2),
    ],
)
def test_any_difference_between_descriptions_is_a_mismatch(other: Description) -> None:
    message = find_mismatch({0: REDUCTION, 3: other})
    assert message.startswith("Mismatched ")
    assert "rank 0: " in message
    assert "rank 3: " in message


def test_barriers_for_different_purposes_mismatch() -> None:
    meeting = Description(kind=Kind.BARRIER, name="process_set", about="add process set [0, 1]")
    assert parse_description(meeting.text) == meeting
    message = find_mismatch({0: meeting, 1: replace(meeting, about="add process set [1]")})
    assert (
        "One rank asked to add process set [0, 1], but another rank asked to add process set [1]." in message
    )
    assert "rank 1: process_set BARRIER add process set [1]" in message


def test_equal_scales_of_another_type_are_no_mismatch() -> None:
    assert find_mismatch({0: replace(REDUCTION, prescale=2), 1: replace(REDUCTION, prescale=2.0)}) is None


def test_rows_may_differ_where_they_are_gathered() -> None:
    assert find_mismatch({0: GATHERING, 1: replace(GATHERING, shapes=((0, 3),))}) is None
    message = find_mismatch({0: GATHERING, 1: replace(GATHERING, shapes=((4, 2),))})
    assert "dimension 1 equal to 3" in message
