"""Ranks that wait for different operations under one name, and ranks that only seem to."""

from __future__ import annotations

from sparkdl.horovod.torch.engine.plan import RequestReport, find_clashes, parse_report
from sparkdl.horovod.torch.engine.request import Description, Kind

JOIN = Description(kind=Kind.JOIN, name="join")
BARRIER = Description(kind=Kind.BARRIER, name="barrier")


def request(name: str) -> Description:
    kind = Kind(name.partition(".")[0].removeprefix("grouped_").upper())
    return Description(kind=kind, name=name, dtypes=("float32",), shapes=((2,),), op=1)


REDUCED, GROUPED, GATHERED = (
    request(f"{kind}.m") for kind in ("allreduce", "grouped_allreduce", "allgather")
)


def waiting(*requests: Description, behind: tuple[Description, ...] = ()) -> RequestReport:
    """The report of a rank with threads that wait for ``requests``, and with requests that no thread waits for."""
    return RequestReport(requests=behind + requests, awaited=frozenset(entry.name for entry in requests))


def test_reports_travel_as_text() -> None:
    report = RequestReport(
        requests=(REDUCED, BARRIER),
        awaited=frozenset(["barrier"]),
        stalled={"a": 3.0},
        clashing=frozenset("m"),
    )
    for sent in (report, RequestReport(requests=())):
        assert parse_report(sent.text) == sent


def test_clashing_requests_under_a_name_fail_with_the_request_of_each_rank() -> None:
    clashes = find_clashes([waiting(GATHERED), waiting(BARRIER, REDUCED), waiting(GATHERED)])
    assert [step.description for step in clashes["m"]] == [GATHERED, REDUCED]
    [error] = {step.error for step in clashes["m"]}
    assert error.startswith("Mismatched operations: One rank did an ALLGATHER, ")
    assert "rank 0: allgather.m" in error
    assert "rank 1: allreduce.m" in error
    assert "rank 2: allgather.m" in error


def test_a_group_and_a_tensor_clash() -> None:
    [step, _] = find_clashes([waiting(GROUPED), waiting(REDUCED)])["m"]
    assert "One rank did an GROUPED_ALLREDUCE, but another rank did an ALLREDUCE" in step.error


def test_requests_that_may_still_match_do_not_clash() -> None:
    assert find_clashes([waiting(GATHERED), waiting(request("allreduce.n"))]) == {}
    assert find_clashes([waiting(GATHERED), waiting(BARRIER, behind=(REDUCED,))]) == {}
    assert find_clashes([waiting(GATHERED), waiting(REDUCED), waiting(BARRIER)]) == {}
    assert find_clashes([waiting(GATHERED), waiting(GATHERED)]) == {}
    numbered = request("allreduce.noname.1"), request("allgather.noname.1")
    assert find_clashes([waiting(entry) for entry in numbered]) == {}


def test_ranks_that_have_joined_do_not_clash() -> None:
    assert set(find_clashes([None, waiting(GATHERED), waiting(REDUCED)])) == {"m"}
    assert set(find_clashes([waiting(JOIN, behind=(REDUCED,)), waiting(GATHERED), waiting(REDUCED)])) == {"m"}
    assert find_clashes([None, waiting(REDUCED)]) == {}
    assert find_clashes([None, waiting(JOIN, REDUCED)]) == {}
