"""The ranks of one library as their caller sees them: turns, failures and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.bench import rank_group
from sparkdl.bench.libraries import LIBRARIES, Library
from sparkdl.bench.rank_group import RankGroup
from sparkdl.errors import CommunicatorTimeoutError, RankError
from tests.collective.eventually import eventually

TURN = {
    "benchmark": "allreduce",
    "contender": "native",
    "case": {"num_bytes": 1024, "num_tensors": 1, "num_buffers": 2},
    "repetitions": 3,
    "operations": 2,
}

# Reads the lines of a rank and answers each turn with an empty result. Writes its process id to a folder.
OBEDIENT_RANK = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
sys.stdin.readline()
while True:
    print("{}", flush=True)
    if not sys.stdin.readline():
        break
"""
SILENT_RANK = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
sys.stdin.read()
"""


def states_of_ranks(folder: Path) -> set[str]:
    """The kernel's state letters of the processes whose ids are in a folder; "" for one that has ended."""
    states = set()
    for path in folder.iterdir():
        try:
            states.add(Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0])
        except FileNotFoundError:
            states.add("")
    return states


def test_turns_are_answered_by_every_rank_with_a_time_per_repetition() -> None:
    with RankGroup("native", 2) as group:
        group.wait_until_ready()
        for contender in ("native", "arena", "copy"):
            answers = group.take_turn({**TURN, "contender": contender}, timeout_s=60.0)
            assert [len(answer["times"]) for answer in answers] == [3, 3]


def test_failed_rank_is_named_with_its_error() -> None:
    with RankGroup("native", 2) as group:
        group.wait_until_ready()
        with pytest.raises(RankError, match=r"rank \d of native .* 'nobody'"):
            group.take_turn({**TURN, "contender": "nobody"}, timeout_s=60.0)


def test_ranks_that_do_not_answer_are_named_at_the_deadline_and_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_group, "RANK_ARGUMENTS", ("-c", SILENT_RANK, str(tmp_path)))
    with RankGroup("native", 2) as group:
        assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        with pytest.raises(CommunicatorTimeoutError, match=r"native: ranks 0, 1 did not answer within 0.2 s"):
            group.take_turn(TURN, timeout_s=0.2)
    assert states_of_ranks(tmp_path) == {""}


def test_ranks_that_would_disturb_others_are_stopped_between_their_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(LIBRARIES, "restless", Library(is_stopped_when_idle=True))
    monkeypatch.setattr(rank_group, "RANK_ARGUMENTS", ("-c", OBEDIENT_RANK, str(tmp_path)))
    with RankGroup("restless", 2) as group:
        group.wait_until_ready()
        assert eventually(lambda: states_of_ranks(tmp_path) == {"T"})
        assert group.take_turn(TURN, timeout_s=60.0) == [{}, {}]
        assert eventually(lambda: states_of_ranks(tmp_path) == {"T"})
    assert states_of_ranks(tmp_path) == {""}
