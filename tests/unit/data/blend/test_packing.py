from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.data import PackedBatch, SequencePacker
from sparkdl.errors import DataError, ParamError

LENGTH = 12
counts = st.lists(st.integers(0, 30), max_size=40)
settings_of_packers = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 4), "num_open_rows": st.integers(1, 5)}
)


def numbered(lengths: Sequence[int]) -> list[np.ndarray]:
    """Documents in which no token occurs twice or equals the padding."""
    borders = np.cumsum([1, *lengths])
    return [np.arange(start, stop) for start, stop in itertools.pairwise(borders)]


def pieces_of(documents: Sequence[np.ndarray]) -> list[list[int]]:
    return [
        document[start : start + LENGTH].tolist()
        for document in documents
        for start in range(0, len(document), LENGTH)
    ]


def sequences_of(batch: PackedBatch) -> list[list[int]]:
    """The documents of a batch, found by its cumulative lengths."""
    line, ids = batch.tokens.ravel(), batch.document_ids.ravel()
    pairs = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    return [line[start:stop].tolist() for start, stop in pairs if ids[start] >= 0]


@given(counts, settings_of_packers)
def test_every_document_is_packed_once_and_whole(lengths: list[int], options: dict[str, int]) -> None:
    documents = numbered(lengths)
    batches = list(SequencePacker(LENGTH, **options).pack([documents]))
    found = [sequence for batch in batches for sequence in sequences_of(batch)]
    assert sorted(found) == sorted(pieces_of(documents))
    if options["num_open_rows"] == 1:
        assert found == pieces_of(documents)
    assert all(batch.tokens.shape == (options["batch_size"], LENGTH) for batch in batches[:-1])
    assert sum(batch.num_tokens for batch in batches) == sum(lengths)


@given(counts, settings_of_packers)
def test_borders_positions_and_numbers_of_documents_agree(
    lengths: list[int], options: dict[str, int]
) -> None:
    for batch in SequencePacker(LENGTH, pad_token=-7, **options).pack([numbered(lengths)]):
        assert batch.cu_seqlens.dtype == np.int32
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == batch.tokens.size
        assert batch.max_seqlen == np.diff(batch.cu_seqlens).max()
        for row in range(len(batch.tokens)):
            starts = batch.cu_seqlens[
                (batch.cu_seqlens >= row * LENGTH) & (batch.cu_seqlens < (row + 1) * LENGTH)
            ]
            assert starts[0] == row * LENGTH, "no sequence spans two rows"
            for number, (start, stop) in enumerate(
                zip(starts - row * LENGTH, [*(starts[1:] - row * LENGTH), LENGTH], strict=True)
            ):
                is_padding = batch.tokens[row, start] == -7
                assert (batch.document_ids[row, start:stop] == (-1 if is_padding else number)).all()
                np.testing.assert_array_equal(batch.position_ids[row, start:stop], np.arange(stop - start))
                assert not is_padding or (batch.tokens[row, start:stop] == -7).all()


@given(counts, settings_of_packers)
def test_labels_are_the_next_token_of_the_same_document_and_nothing_else(
    lengths: list[int], options: dict[str, int]
) -> None:
    documents = numbered(lengths)
    following = {
        int(token): int(after) for piece in pieces_of(documents) for token, after in itertools.pairwise(piece)
    }
    for batch in SequencePacker(LENGTH, **options).pack([documents]):
        expected = [[following.get(int(token), -100) for token in row] for row in batch.tokens]
        np.testing.assert_array_equal(batch.labels(), expected)
        np.testing.assert_array_equal(batch.loss_mask, batch.labels() != -100)
        assert batch.labels(ignored=-1).min(initial=-1) == -1


@given(counts, settings_of_packers, st.integers(1, 7), st.integers(0, 8))
def test_resumed_packer_continues_with_the_next_batch(
    lengths: list[int], options: dict[str, int], portion: int, taken: int
) -> None:
    documents = numbered(lengths)
    portions = [documents[start : start + portion] for start in range(0, len(documents), portion)]
    whole = list(SequencePacker(LENGTH, **options).pack(portions))
    first = SequencePacker(LENGTH, **options)
    left = iter(portions)
    begun = [batch for _, batch in zip(range(taken), first.pack(left), strict=False)]
    resumed = SequencePacker(LENGTH, **options)
    resumed.resume(json.loads(json.dumps(first.state())))
    for expected, batch in zip(whole, [*begun, *resumed.pack(left)], strict=True):
        np.testing.assert_array_equal(batch.tokens, expected.tokens)
        np.testing.assert_array_equal(batch.cu_seqlens, expected.cu_seqlens)


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=40))
def test_a_row_in_order_is_only_closed_when_the_next_document_does_not_fit(lengths: list[int]) -> None:
    rows = [
        [len(sequence) for sequence in sequences_of(batch)]
        for batch in SequencePacker(LENGTH, batch_size=1).pack([numbered(lengths)])
    ]
    assert all(sum(row) + following[0] > LENGTH for row, following in itertools.pairwise(rows))


def test_more_open_rows_need_less_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, LENGTH, 400)

    def rows_needed(num_open_rows: int) -> int:
        packer = SequencePacker(LENGTH, batch_size=1, num_open_rows=num_open_rows)
        return sum(1 for _ in packer.pack([numbered(lengths)]))

    least = -(-int(lengths.sum()) // LENGTH)
    assert least < rows_needed(16) < 1.1 * least < rows_needed(1)


def test_first_fit_takes_the_first_row_with_room() -> None:
    packer = SequencePacker(4, batch_size=3, num_open_rows=3)
    (batch,) = packer.pack([[[1, 1, 1], [2, 2], [3, 3, 3], [4], [5, 5]]])
    assert batch.tokens.tolist() == [[1, 1, 1, 4], [2, 2, 5, 5], [3, 3, 3, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, -1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 8, 11, 12]


def test_long_documents_are_refused_when_asked() -> None:
    packer = SequencePacker(4, batch_size=1, long_documents="refuse")
    packer.add([[1, 2, 3, 4]])
    with pytest.raises(DataError, match="A document has 5 tokens, but rows have 4"):
        packer.add([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("document", "message"),
    [([1.5, 2.0], "array of float64"), ([[1, 2]], r"shape \(1, 2\)"), (["a"], "Encode text")],
)
def test_document_that_is_no_sequence_of_integers_is_refused(document: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SequencePacker(4, batch_size=1).add([document])


def test_tokens_that_the_dtype_cannot_hold_are_refused() -> None:
    packer = SequencePacker(4, batch_size=1, dtype=np.uint16)
    packer.add([np.array([65535, 0])])
    with pytest.raises(DataError, match="tokens from 1 to 65536, which uint16 cannot hold"):
        packer.add([np.array([65536, 1])])


def test_changing_documents_after_adding_them_does_not_change_the_rows() -> None:
    documents = np.arange(1, 9).reshape(2, 4)
    packer = SequencePacker(4, batch_size=2)
    packer.add(documents)
    documents[:] = 0
    batch = packer.pop()
    assert batch is not None
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"length": 1.5}, "length must be a whole number, got 1.5"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_open_rows": 0}, "num_open_rows must be at least 1, got 0"),
        ({"long_documents": "drop"}, "must be 'split' or 'refuse', got 'drop'"),
        ({"dtype": "float32"}, "must be an integer dtype, got float32"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        SequencePacker(**{"length": 4, "batch_size": 1, **options})


def test_integers_of_numpy_are_taken_and_the_state_is_json() -> None:
    packer = SequencePacker(np.int64(4), batch_size=np.int32(2), num_open_rows=np.int64(1))  # type: ignore[arg-type]  # as users give them
    json.dumps(packer.state())


def test_a_state_of_another_length_is_refused() -> None:
    with pytest.raises(ParamError, match="have 4 tokens, .* rows of 8"):
        SequencePacker(4, batch_size=1).resume(SequencePacker(8, batch_size=1).state())


@pytest.mark.parametrize("state", [{}, None, {"length": 4, "open": []}])
def test_invalid_state_of_a_packer_is_refused(state: object) -> None:
    with pytest.raises(ParamError, match="a dict of format, length, open, done"):
        SequencePacker(4, batch_size=1).resume(state)
