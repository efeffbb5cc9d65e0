from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdl.collective import Coordinator, PmiServer, RendezvousClient, new_secret, pmi_environment
from sparkdl.rendezvous.pmi import process_mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

from tests.collective.eventually import eventually

SECRET = new_secret()

HELLO = """
from mpi4py import MPI
import numpy as np
total = np.full(1000, MPI.COMM_WORLD.rank + 1.0)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total)
print(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, total[0], MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).size)
"""


@pytest.fixture
def client() -> Iterator[RendezvousClient]:
    with (
        Coordinator(secret=SECRET, world_size=2) as coordinator,
        RendezvousClient.connect(coordinator.address, SECRET, 10.0) as connected,
    ):
        yield connected


class Talk:
    """The rank's side of the protocol, written by hand."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(10.0)
        self.sock = sock
        self.lines = sock.makefile("r")

    def say(self, line: str) -> None:
        self.sock.sendall(line.encode() + b"\n")

    def ask(self, line: str) -> str:
        self.say(line)
        return self.lines.readline().strip()


@pytest.fixture
def talks(client: RendezvousClient) -> Iterator[list[Talk]]:
    with ExitStack() as stack:
        spoken = []
        for rank in range(2):
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            stack.enter_context(PmiServer(ours, client, rank, 2, host_of_rank=[0, 1], timeout_s=5.0))
            spoken.append(Talk(theirs))
            stack.enter_context(spoken[-1].lines)
        yield spoken


@contextmanager
def mpi_ranks(
    client: RendezvousClient, program: str, world_size: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a program on ranks of this host as plain child processes."""
    pytest.importorskip("mpi4py", reason="needs the extra mpi")
    processes = []
    with ExitStack() as stack:
        for rank in range(world_size):
            ours, theirs = socket.socketpair()
            stack.enter_context(
                PmiServer(ours, client, rank, world_size, host_of_rank=[0] * world_size, timeout_s=30.0)
            )
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **pmi_environment(theirs.fileno(), rank, world_size)},
                stdout=subprocess.PIPE,
                text=True,
            )
            theirs.close()
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def test_plain_child_processes_form_an_mpi_world_without_mpirun(client: RendezvousClient) -> None:
    with mpi_ranks(client, HELLO, 3) as processes:
        answers = [process.communicate(timeout=500)[0].split() for process in processes]
    assert answers == [[str(rank), "3", "6.0", "3"] for rank in range(3)]


def test_put_of_one_rank_is_read_by_the_other_after_the_barrier(talks: list[Talk]) -> None:
    name = talks[0].ask("cmd=get_my_kvsname").partition("kvsname=")[2]
    assert talks[1].ask("cmd=get_my_kvsname").endswith(name)
    assert "rc=0" in talks[0].ask(f"cmd=put kvsname={name} key=business-card value=a=b#c")
    for talk in talks:
        talk.say("cmd=barrier_in")
    for talk in talks:
        assert talk.lines.readline() == "cmd=barrier_out\n"
    assert talks[1].ask(f"cmd=get kvsname={name} key=business-card").endswith("value=a=b#c")


def test_questions_of_mpich_are_answered(talks: list[Talk]) -> None:
    talk = talks[0]
    assert talk.ask("cmd=init pmi_version=1 pmi_subversion=1") == (
        "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
    )
    assert talk.ask("cmd=get_maxes").startswith("cmd=maxes kvsname_max=")
    assert talk.ask("cmd=get_appnum") == "cmd=appnum appnum=0"
    assert talk.ask("cmd=get_universe_size") == "cmd=universe_size size=2"
    assert talk.ask("cmd=get key=PMI_process_mapping").endswith("value=(vector,(0,1,1),(1,1,1))")
    assert "rc=-1" in talk.ask("cmd=get key=absent")
    assert "rc=-1" in talk.ask("cmd=spawn")
    assert "rc=-1" in talk.ask(f"cmd=put key={'k' * 100} value=v")
    assert talk.ask("cmd=finalize") == "cmd=finalize_ack"


def test_barrier_with_a_missing_rank_hangs_up_and_names_it(client: RendezvousClient) -> None:
    ours, theirs = socket.socketpair()
    with theirs, PmiServer(ours, client, 0, 2, timeout_s=0.2) as server:
        talk = Talk(theirs)
        assert talk.ask("cmd=barrier_in") == ""
        assert "waited for rank 1 of 2" in str(server.failure)
        talk.lines.close()


def test_mpi_abort_is_reported(client: RendezvousClient) -> None:
    ours, theirs = socket.socketpair()
    with theirs, PmiServer(ours, client, 0, 1) as server:
        talk = Talk(theirs)
        talk.say("cmd=abort exitcode=7")
        assert eventually(lambda: server.failure is not None)
        assert server.failure == "rank 0 called MPI_Abort with exit code 7"
        talk.lines.close()


def test_shared_memory_of_a_killed_mpi_rank_is_removed(client: RendezvousClient) -> None:
    die = "import os, signal; from mpi4py import MPI; os.kill(os.getpid(), signal.SIGKILL)"
    before = set(Path("/dev/shm").glob("mpich_*"))
    with mpi_ranks(client, die, 2) as processes:
        for process in processes:
            process.communicate(timeout=60)
    assert eventually(lambda: set(Path("/dev/shm").glob("mpich_*")) <= before)


@pytest.mark.parametrize(
    ("host_of_rank", "mapping"),
    [
        ([0], "(vector,(0,1,1))"),
        ([0, 0, 0], "(vector,(0,1,3))"),
        ([0, 0, 1, 1], "(vector,(0,1,2),(1,1,2))"),
        ([0, 1, 0], "(vector,(0,1,1),(1,1,1),(0,1,1))"),
    ],
)
def test_mapping_says_who_shares_a_host(host_of_rank: list[int], mapping: str) -> None:
    assert process_mapping(host_of_rank) == mapping
