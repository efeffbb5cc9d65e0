from __future__ import annotations

import pytest

from sparkdl.collective.mpi.operations import JOIN, Signature, agree_on_signature
from sparkdl.errors import MismatchError

GRAD = Signature(kind="allreduce", name="grad", dtype="float32", size=10, op="sum")


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (GRAD, "allreduce 'grad' of 10 float32 by sum"),
        (Signature(kind="barrier"), "barrier"),
        (Signature(kind="broadcast", dtype="int8", size=3, root=1), "broadcast of 3 int8 from rank 1"),
        (
            Signature(kind="reduce", dtype="int8", size=3, op="max", root=1, postscale=0.5),
            "reduce of 3 int8 by max, postscale 0.5 to rank 1",
        ),
        (Signature(kind="allgather", dtype="bool", blocks=(3, 4)), "allgather of bool in blocks of 3, 4"),
        (
            Signature(kind="allreduce", dtype="bool", size=7, arrays=(3, 4), op="sum"),
            "allreduce of 7 bool in arrays of 3, 4 by sum",
        ),
        (
            Signature(kind="alltoall", dtype="int8", sends=(1, 0), receives=(1, 2)),
            "alltoall of int8 in blocks of 1, 0 for blocks of 1, 2",
        ),
        (
            Signature(kind="allgather", dtype="int8", blocks=tuple(range(40))),
            f"allgather of int8 in blocks of {', '.join(map(str, range(32)))}, and 8 more, 780 in all",
        ),
    ],
)
def test_words_of_a_signature(signature: Signature, words: str) -> None:
    assert str(signature) == words


@pytest.mark.parametrize(
    "signature",
    [
        GRAD,
        Signature(kind="alltoall", dtype="int8", sends=(1, 0), receives=(1, 2)),
        Signature(kind=JOIN, joined_at=7),
    ],
)
def test_signature_survives_its_way_to_other_ranks(signature: Signature) -> None:
    assert Signature.from_bytes(signature.to_bytes()) == signature


def test_disagreement_says_which_ranks_said_what() -> None:
    other = Signature(kind="allreduce", name="grad", dtype="float32", size=11, op="sum")
    with pytest.raises(MismatchError) as caught:
        agree_on_signature([GRAD, other, GRAD], 17)
    assert str(caught.value) == (
        "the ranks disagree about operation 17: ranks 0, 2 said allreduce 'grad' of 10 float32 by sum;"
        " rank 1 said allreduce 'grad' of 11 float32 by sum"
    )


def test_joined_ranks_do_not_affect_the_agreement_of_the_others() -> None:
    joined = Signature(kind=JOIN, joined_at=3)
    assert agree_on_signature([joined, GRAD, joined], 4) == GRAD
    with pytest.raises(MismatchError, match=r"ranks 0, 2 said join; rank 1 said broadcast"):
        agree_on_signature([joined, Signature(kind="broadcast", dtype="int8", size=3, root=1), joined], 4)


def exchange(sends: list[list[int]], receives: list[list[int]]) -> list[Signature]:
    return [
        Signature(kind="alltoall", dtype="int8", sends=tuple(sent), receives=tuple(received))
        for sent, received in zip(sends, receives, strict=True)
    ]


def balance(signatures: list[Signature]) -> int:
    return sum(signature.balance(rank) for rank, signature in enumerate(signatures)) % 2**64


def test_exchange_is_balanced_if_each_rank_receives_what_the_others_send() -> None:
    signatures = exchange([[1, 2, 3], [0, 0, 9], [4, 5, 6]], [[1, 0, 4], [2, 0, 5], [3, 9, 6]])
    assert balance(signatures) == 0
    assert len({signature.digest for signature in signatures}) == 1
    assert agree_on_signature(signatures, 0).kind == "alltoall"


def test_unbalanced_exchange_names_ranks_and_counts() -> None:
    # The sums are equal, and so are the numbers of blocks.
    signatures = exchange([[1, 2], [3, 4]], [[1, 2], [3, 4]])
    assert balance(signatures) != 0
    with pytest.raises(MismatchError, match="rank 0 sends 2 elements to rank 1, which expects 3"):
        agree_on_signature(signatures, 0)
