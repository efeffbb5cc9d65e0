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
from sparkdl.estimators.scoring.udf import Packing, ScoringModel, packing_of, score_columns
from sparkdl.model.inputs import MATRIX
from sparkdl.model.signature import ModelOutput, ModelSignature
from tests.training.signatures import make_inputs, packed


class Joined(nn.Module):
    """A linear layer over several scalar columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, *columns):
        return self.linear(torch.cat(columns, dim=1))


ABC = make_inputs("a", "b", "c")
SIGNATURE = ModelSignature(inputs=ABC, outputs=(ModelOutput(name="y", kind="value", shape=(2,)),))
MODEL = ScoringModel(*packed(Joined()), SIGNATURE, 4)
INPUTS_AS_MATRIX = replace(ABC, given_by="matrix", inputs=make_inputs(MATRIX).inputs)
MODEL_OF_A_MATRIX = ScoringModel(*packed(Joined().linear), replace(SIGNATURE, inputs=INPUTS_AS_MATRIX), 4)
NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(
    rows=st.lists(st.lists(NUMBERS | st.none(), min_size=3, max_size=3), max_size=9),
    element=st.sampled_from(["float", "double"]),
)
@settings(max_examples=50, deadline=None)
def test_packed_columns_and_matrices_are_scored_as_columns_are(rows, element):
    arrow = {"float": pa.float32(), "double": pa.float64()}[element]
    columns = tuple(pa.array([row[index] for row in rows], arrow) for index in range(3))
    apart = next(score_columns(MODEL, iter([columns])))
    packed = pa.array(rows, pa.list_(arrow))
    found = next(score_columns(MODEL, iter([(packed,)]), packing=Packing(element)))
    assert found.type == apart.type
    assert found.to_pylist() == apart.to_pylist()
    assert [value is None for value in found.to_pylist()] == [None in row for row in rows]
    expected = [None if row is None else pytest.approx(row, rel=1e-5, abs=1e-6) for row in apart.to_pylist()]
    for batch, packing in ((columns, None), ((packed,), Packing(element))):
        found = next(score_columns(MODEL_OF_A_MATRIX, iter([batch]), packing=packing))
        assert found.to_pylist() == expected


PREPARED = replace(ABC, prepare=lambda columns: columns)


def test_a_function_of_the_users_own_gets_the_types_of_the_columns():
    rows = pa.array([[1, 2, 3], [4, 5, 2**60 + 1]], pa.list_(pa.int64()))
    packing = packing_of([T.LongType()] * 3, PREPARED)
    found, absent = packing.unpack(rows, PREPARED)
    assert absent is None
    expected = {"a": [1, 4], "b": [2, 5], "c": [3, 2**60 + 1]}
    assert {name: values.tolist() for name, values in found.items()} == expected
    assert {values.dtype for values in found.values()} == {np.dtype("int64")}
    assert all(values.flags.writeable for values in found.values())


@pytest.mark.parametrize(
    ("types", "inputs", "expected"),
    [
        ([T.DoubleType()] * 3, ABC, "float"),
        ([T.BooleanType()] * 3, ABC, "float"),
        ([T.DoubleType(), T.LongType(), T.FloatType()], ABC, "float"),
        ([T.DoubleType()] * 3, make_inputs("a", "b", "c", dtypes=("float64",) * 3), "double"),
        ([T.LongType()] * 3, make_inputs("a", "b", "c", dtypes=("float32", "float32", "int64")), "bigint"),
        ([T.LongType(), T.LongType(), T.IntegerType()], PREPARED, None),
        ([T.BooleanType()] * 3, PREPARED, "boolean"),
        ([T.StringType()] * 3, ABC, None),
        ([T.DecimalType(10, 2)] * 3, ABC, None),
        ([T.DoubleType()], make_inputs("a"), None),
        ([T.DoubleType()] * 2, make_inputs("a", "b", b=Column(name="b", dtype="float64", shape=(1,))), None),
    ],
)
def test_numeric_columns_are_packed_in_the_type_that_the_model_takes(types, inputs, expected):
    assert packing_of(types, inputs) == (expected and Packing(expected))
