"""Descriptions of requests as text; tests/horovod/matching_checks.py compares those of ranks."""

from __future__ import annotations

from dataclasses import replace

from sparkdl.horovod.torch.engine.request import Description, Kind, parse_description

REDUCTION = Description(
    kind=Kind.ALLREDUCE, name="allreduce.w", dtypes=("float32",), shapes=((2, 3),), op=0, prescale=0.5
)
GATHERING = Description(kind=Kind.ALLGATHER, name="allgather.w", dtypes=("int64",), shapes=((4, 3),))


def test_descriptions_travel_as_text() -> None:
    barrier = Description(kind=Kind.BARRIER, name="barrier", about="add process set [0, 1]")
    for description in (REDUCTION, GATHERING, barrier):
        assert parse_description(description.text) == description
        assert "\n" not in replace(description, name="two\nlines").text


def test_labels_are_short_and_readable() -> None:
    assert REDUCTION.label == "allreduce.w ALLREDUCE float32[2, 3] op=0 scales=0.5,1.0"
    many = replace(REDUCTION, dtypes=("float32",) * 100, shapes=((2, 3),) * 100)
    assert "100 tensors" in many.label
    assert len(many.label) < 120
    assert replace(many, shapes=((2, 3),) * 99 + ((3, 2),)).label != many.label
