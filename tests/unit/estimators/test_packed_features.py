from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T
from torch import nn

from sparkdl.data import Column
from sparkdl.estimators.packed_features import can_be_packed, unpacked
from sparkdl.estimators.scoring import ScoringModel, score_columns
from sparkdl.training.architecture import pack_module
from sparkdl.training.signature import ModelOutput, ModelSignature
from tests.training.signatures import make_inputs


class Joined(nn.Module):
    """A linear layer over scalar columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, *columns):
        return self.linear(torch.cat(columns, dim=1))


SIGNATURE = ModelSignature(
    inputs=make_inputs("a", "b", "c"), outputs=(ModelOutput(name="y", kind="value", shape=(2,)),)
)
MODEL = ScoringModel(pack_module(Joined()), SIGNATURE, 4)
NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(
    rows=st.lists(st.lists(NUMBERS | st.none(), min_size=3, max_size=3), max_size=9),
    element=st.sampled_from([pa.float64(), pa.float32()]),
)
@settings(max_examples=50, deadline=None)
def test_packed_columns_are_scored_as_columns_are(rows, element):
    columns = tuple(pa.array([row[index] for row in rows], element) for index in range(3))
    apart = next(score_columns(MODEL, iter([columns])))
    packed = next(score_columns(MODEL, iter([(pa.array(rows, pa.list_(element)),)]), is_packed=True))
    assert packed.type == apart.type
    assert packed.to_pylist() == apart.to_pylist()
    assert [value is None for value in packed.to_pylist()] == [None in row for row in rows]


def test_a_function_of_the_users_own_gets_the_types_of_the_columns():
    rows = pa.array([[1, 2, 3], [4, 5, 2**60 + 1]], pa.list_(pa.int64()))
    inputs = replace(SIGNATURE.inputs, prepare=lambda columns: columns)
    found, absent = unpacked(rows, inputs)
    assert absent is None
    assert {name: values.tolist() for name, values in found.items()} == {
        "a": [1, 4],
        "b": [2, 5],
        "c": [3, 2**60 + 1],
    }
    assert {values.dtype for values in found.values()} == {np.dtype("int64")}
    converted, _ = unpacked(rows, SIGNATURE.inputs)
    assert {values.dtype for values in converted.values()} == {np.dtype("float32")}
    embedded, _ = unpacked(rows, make_inputs("a", "b", "c", dtypes=("float32", "float32", "int64")))
    assert embedded["c"].tolist() == [3, 2**60 + 1]


@pytest.mark.parametrize(
    ("types", "shape", "expected"),
    [
        ([T.DoubleType()] * 3, (), True),
        ([T.BooleanType()] * 3, (), True),
        ([T.DoubleType(), T.DoubleType(), T.FloatType()], (), False),
        ([T.StringType()] * 3, (), False),
        ([T.DecimalType(10, 2)] * 3, (), False),
        ([T.DoubleType()] * 3, (1,), False),
    ],
)
def test_columns_of_one_type_of_number_are_packed(types, shape, expected):
    inputs = make_inputs("a", "b", "c", c=Column(name="c", dtype="float64", shape=shape))
    assert can_be_packed(types, inputs) is expected
    assert not can_be_packed([T.DoubleType()], make_inputs("a"))
