"""Files of weights: they are read back unchanged, and are compatible with safetensors."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkdl.errors import SavedModelError, SerializationError
from sparkdl.model.weights_file import (
    map_weights,
    read_header,
    read_rows,
    read_weights,
    write_weights,
)

LARGE = 4 << 20
"""As many bytes as are copied at once."""

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = (f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64))
DTYPES = [getattr(torch, name) for name in (*FLOATS, *INTEGERS, "bool") if hasattr(torch, name)]
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 4), max_size=3)


def tensor_of(dtype: torch.dtype, shape: list[int], *, is_contiguous: bool = True) -> Tensor:
    tensor = torch.randint(0, 2, shape).to(dtype)
    return tensor if is_contiguous else tensor.movedim(0, -1) if shape else tensor


def written(tensors: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    write_weights(tensors, file)
    return file.getvalue()


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A function that writes tensors to the file ``weights``, and maps them."""

    def make(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with (tmp_path / "weights").open("wb") as file:
            write_weights(tensors, file)
        return map_weights(tmp_path / "weights")

    return make


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        given, wanted = (
            tensors.reshape(-1).contiguous().view(torch.uint8) for tensors in (found[name], tensor)
        )
        assert torch.equal(given, wanted), name


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.builds(tensor_of, dtypes, shapes, is_contiguous=st.booleans()),
        max_size=6,
    )
)
def test_written_weights_are_read_back_and_by_safetensors_too(tensors: dict[str, Tensor]) -> None:
    file = io.BytesIO()
    described = write_weights(tensors, file)
    content = file.getvalue()
    assert described == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert_equal(safetensors.torch.load(content), tensors)
    assert_equal(read_weights(io.BytesIO(content)), tensors)


def test_rows_of_a_tensor_are_read_without_the_rest() -> None:
    tensors = {"wide": torch.arange(24.0).view(6, 4), "odd": torch.arange(7, dtype=torch.uint8)}
    file = io.BytesIO(written(tensors))
    header = read_header(file)
    assert torch.equal(read_rows(file, header["wide"], 2, 3), tensors["wide"][2:5])
    assert torch.equal(read_rows(file, header["odd"], 6, 1), tensors["odd"][6:])
    with pytest.raises(SavedModelError, match="too early"):
        read_rows(file, header["odd"], 6, 2 * LARGE)


def test_a_column_of_one_row_is_written_whatever_its_stride() -> None:
    tensors = {"one": torch.arange(10.0).view(1, 10)[:, 3], "none": torch.zeros(0, 10)[:, 0]}
    found = read_weights(io.BytesIO(written(tensors)))
    assert (found["one"].tolist(), found["none"].shape) == ([3], (0,))


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.builds(tensor_of, dtypes, shapes), max_size=4))
def test_weights_written_by_safetensors_are_read(tensors: dict[str, Tensor]) -> None:
    tensors.pop("__metadata__", None)
    content = safetensors.torch.save(tensors, metadata={"of": "another program"})
    assert_equal(read_weights(io.BytesIO(content)), tensors)


def test_tensors_that_span_several_chunks_and_views_of_one_memory_are_written_each(
    tmp_path: Path, mapped: Any
) -> None:
    whole = torch.arange(LARGE, dtype=torch.int32)  # four bytes per element
    tensors = {"whole": whole, "half": whole[: LARGE // 2], "turned": whole.view(2, -1).T}
    assert_equal(mapped(tensors), tensors)
    assert (
        (tmp_path / "weights").stat().st_size
        > sum(tensor.nbytes for tensor in tensors.values())
        == 10 * LARGE
    )


def test_mapped_tensors_are_aligned_except_after_one_of_an_odd_size(mapped: Any) -> None:
    sizes = {"a": 3, "b": 16, "c": 32, "d": 1600, "bias": 10}
    found = mapped({name: torch.zeros(size) for name, size in sizes.items()})
    assert [found[name].data_ptr() % 64 for name in "bcda"] == [0] * 4
    assert found["bias"].data_ptr() % 4 == 0


def test_changes_of_mapped_weights_do_not_reach_the_file(tmp_path: Path, mapped: Any) -> None:
    path = tmp_path / "weights"
    mapped({"x": torch.zeros(5)})["x"].add_(1)
    found = map_weights(path)["x"]
    assert found.tolist() == [0] * 5
    path.unlink()
    assert found.add_(2).tolist() == [2] * 5


@pytest.mark.parametrize("length", [0, 5, 20, -1])
def test_weights_that_end_too_early_are_named(tmp_path: Path, length: int) -> None:
    content = written({"first": torch.zeros(5), "last": torch.zeros(3)})[:length]
    with pytest.raises(SavedModelError, match=r"not a file of weights|4 bytes|1 bytes too early, in 'last'"):
        read_weights(io.BytesIO(content))
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(SavedModelError, match="The weights in .* cannot be read"):
        map_weights(tmp_path / "weights")


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(SerializationError, match="'x' has the dtype torch.complex64"):
        written({"x": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize(
    "content", [b"\xff" * 64, b"PK\x03\x04\x14\0\0\0" * 8, (2).to_bytes(8, "little") + b"[]"]
)
def test_file_of_another_kind_is_refused_without_allocating_the_size_it_claims(content: bytes) -> None:
    with pytest.raises(SavedModelError, match="This is not a file of weights"):
        read_header(io.BytesIO(content))
