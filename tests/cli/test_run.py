"""``sparkdl run`` starts ranks that find each other, passes on their output, and ends all of them together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launchers import environment, run, told, write_script
from tests.processes import is_running, wait_until_gone

REDUCE = """
import numpy
from sparkdl.collective import current_communicator
communicator = current_communicator()
array = numpy.full(3, communicator.rank + 1.0)
communicator.allreduce(array)
tell(communicator.rank, [communicator.transport, communicator.world_size, array.tolist()])
"""

ROUND = """
import numpy
from sparkdl.collective import current_communicator
communicator = current_communicator()
array = numpy.full(1, 1.001, numpy.float32)
communicator.allreduce(array)
tell(communicator.rank, float(array[0]))
"""

FACES = """
import torch
import torch.distributed
import sparkdl.torch
import sparkdl.horovod.torch as hvd
hvd.init()
averaged = hvd.allreduce(torch.full((2,), float(hvd.rank())), name="x")
sparkdl.torch.init_process_group()
tensor = torch.ones(2)
torch.distributed.all_reduce(tensor)
tell(hvd.rank(), [hvd.size(), averaged.tolist(), tensor.tolist()])
torch.distributed.destroy_process_group()
"""

WAIT = """
import os, signal, subprocess, sys, threading
from sparkdl.collective import current_communicator
communicator = current_communicator()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
tell(communicator.rank, [os.getpid(), child.pid])
communicator.barrier()
print("here", flush=True)
threading.Event().wait(600)
"""


def sparkdl_run(
    folder: Path, source: str, *options: str, arguments: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, write_script(folder, source), *arguments]
    return run([*SPARKDL, "run", *options, "--", *command], cwd=folder, variables=variables)


SPARKDL = (sys.executable, "-m", "sparkdl.cli")


def told_pids(folder: Path) -> list[int]:
    """The process ids of the ranks that run WAIT, and of their children."""
    return [pid for pids in told(folder).values() for pid in pids]


@pytest.mark.parametrize(
    ("transport", "carrier"),
    [
        ("auto", "native"),
        pytest.param("tcp", "native", marks=pytest.mark.slow),
        ("mpi", "mpi"),
        pytest.param("hierarchical-mpi", "mpi", marks=pytest.mark.slow),
    ],
)
def test_ranks_find_each_other(tmp_path: Path, transport: str, carrier: str) -> None:
    if transport == "mpi":
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    done = sparkdl_run(tmp_path, REDUCE, "-n", "3", "--transport", transport)
    assert (done.returncode, done.stderr) == (0, "")
    assert told(tmp_path) == {rank: [carrier, 3, [6.0] * 3] for rank in range(3)}


def test_empty_variables_count_as_unset(tmp_path: Path) -> None:
    empty = {"SPARKDL_TIMEOUT_S": "", "SPARKDL_TRANSPORT": "", "SPARKDL_WIRE": ""}
    done = sparkdl_run(tmp_path, "", "-n", "1", **empty)
    assert (done.returncode, done.stderr) == (0, "")


def test_users_choose_the_transport_by_a_variable_too(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, REDUCE, SPARKDL_TRANSPORT="pigeon")
    assert done.returncode == 2
    assert "transport='pigeon' is unknown" in done.stderr


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--wire", "bfloat16"), {}),
        pytest.param((), {"SPARKDL_WIRE": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_users_choose_how_float32_travels(
    tmp_path: Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = sparkdl_run(tmp_path, ROUND, "--transport", "tcp", *options, **variables)
    assert done.returncode == 0, done.stderr
    # 1.001 rounded to the 8 bits of bfloat16's significand is 1.0.
    assert told(tmp_path) == dict.fromkeys((0, 1), 2.0)


def test_torch_and_horovod_find_the_ranks_too(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    done = sparkdl_run(tmp_path, FACES)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {rank: [2, [0.5, 0.5], [2.0, 2.0]] for rank in (0, 1)}


def test_ranks_that_never_looked_for_each_other_end_with_a_warning_and_status_zero(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, "", "-n", "3")
    assert done.returncode == 0
    assert done.stderr.startswith("sparkdl: warning: no rank opened the communicator")
    assert "its 3 ranks trained 3 unconnected models" in done.stderr


def test_programs_that_use_only_mpi_get_no_warning(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    source = "from mpi4py import MPI\ntell(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.allreduce(1))"
    done = sparkdl_run(tmp_path, source, "--transport", "mpi")
    assert (done.returncode, done.stderr) == (0, "")
    assert told(tmp_path) == {0: 2, 1: 2}


def test_lines_carry_the_number_of_their_rank(tmp_path: Path) -> None:
    source = """
import os, sys
print("told", sys.argv[1:])
print("complaint without an end", file=sys.stderr, end="")
"""
    done = sparkdl_run(tmp_path, source, arguments=("-n", "7"))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] told ['-n', '7']" for rank in (0, 1)]
    complaints = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert sorted(complaints) == [f"[rank {rank}] complaint without an end" for rank in (0, 1)]


def test_failed_rank_is_named_although_another_rank_ends_first(tmp_path: Path) -> None:
    source = """
import atexit, numpy, threading
# Runs after the job was left, so that rank 0 ends first.
linger = threading.Event().wait
atexit.register(linger, 1.0)
from sparkdl.collective import current_communicator
communicator = current_communicator()
if communicator.rank == 1:
    raise ValueError("bad batch")
atexit.unregister(linger)
communicator.allreduce(numpy.ones(3))
"""
    done = sparkdl_run(tmp_path, source)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("sparkdl: Rank 1 on ")
    assert done.stderr.endswith(" failed and all ranks were ended: ValueError: bad batch\n")
    assert "[rank 1] ValueError: bad batch" in done.stderr


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("sys.exit(7)", 7, "exited with status 7"),
        pytest.param("os._exit(9)", 9, "exited with status 9", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL (out of memory?)"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSEGV)", 139, "was ended by SIGSEGV", marks=pytest.mark.slow
        ),
    ],
)
def test_rank_that_exits_nonzero_or_is_killed_ends_the_other_ranks(
    tmp_path: Path, ending: str, status: int, words: str
) -> None:
    source = WAIT.replace("print(", f"if communicator.rank == 1: {ending}\nprint(")
    done = sparkdl_run(tmp_path, source, "-n", "2")
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith("sparkdl: Rank 1 on ")
    assert done.stderr.endswith(f": its process {words}\n")
    assert wait_until_gone(told_pids(tmp_path)) == []


def test_processes_that_ranks_leave_running_are_ended(tmp_path: Path) -> None:
    done = sparkdl_run(tmp_path, WAIT.replace("threading.Event().wait(600)", ""))
    assert done.returncode == 0, done.stderr
    assert wait_until_gone(told_pids(tmp_path)) == []


def test_daemon_that_holds_the_output_open_does_not_delay_the_end(tmp_path: Path) -> None:
    source = """
import os, subprocess, sys
rank = int(os.environ["SPARKDL_RANK"])
if rank == 1:
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    tell(rank, daemon.pid)
print("done")
"""
    start = time.monotonic()
    done = sparkdl_run(tmp_path, source)
    seconds = time.monotonic() - start
    os.kill(told(tmp_path)[1], signal.SIGKILL)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] done", "[rank 1] done"]
    assert "[rank 1] A process started by this rank still holds the output" in done.stderr
    assert seconds < 100.0


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signal_to_the_command_leaves_nothing_running(tmp_path: Path, number: int, status: int) -> None:
    command = [*SPARKDL, "run", "-n", "2", "--", sys.executable, str(write_script(tmp_path, WAIT))]
    # A Ctrl-C in the terminal would reach this session, too.
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        for _ in range(2):
            assert b"here" in process.stdout.readline()
        pids = told_pids(tmp_path)
        assert all(is_running(pid) for pid in pids)
        os.kill(process.pid, number)
        assert process.wait(100) == status
        assert wait_until_gone(pids) == []


def test_ranks_end_when_the_reader_of_their_output_ends(tmp_path: Path) -> None:
    source = WAIT.replace("threading.Event().wait(600)", "while True: print('x' * 1000)")
    command = [*SPARKDL, "run", "-n", "2", "--", sys.executable, str(write_script(tmp_path, source))]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        with ThreadPoolExecutor() as pool:
            errors = pool.submit(process.stderr.read)
            assert b"here" in process.stdout.readline()
            process.stdout.close()
            assert process.wait(100) == 128 + signal.SIGPIPE
        assert b"sparkdl" not in errors.result().replace(b"sparkdl.", b"")
        assert wait_until_gone(told_pids(tmp_path)) == []


def test_secret_is_in_no_argument_and_no_file(tmp_path: Path) -> None:
    source = """
import os, pathlib
secret = os.environ["SPARKDL_SECRET"]
arguments = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
tell(int(os.environ["SPARKDL_RANK"]), [len(secret), any(secret.encode() in words for words in arguments)])
assert secret not in "".join(path.read_text() for path in pathlib.Path(".").iterdir())
"""
    done = sparkdl_run(tmp_path, source)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {0: [64, False], 1: [64, False]}


def test_ranks_share_the_cores_unless_omp_num_threads_is_set(tmp_path: Path) -> None:
    source = "import os\ntell(int(os.environ['SPARKDL_RANK']), int(os.environ['OMP_NUM_THREADS']))"
    assert sparkdl_run(tmp_path, source, OMP_NUM_THREADS="5").returncode == 0
    assert told(tmp_path) == {0: 5, 1: 5}
    script = write_script(tmp_path, source)
    variables = environment()
    del variables["OMP_NUM_THREADS"]
    subprocess.run([*SPARKDL, "run", str(script)], cwd=tmp_path, env=variables, check=True, timeout=500)
    assert told(tmp_path) == {rank: max(1, len(os.sched_getaffinity(0)) // 2) for rank in (0, 1)}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "sparkdl run: a command is missing, as in: sparkdl run -n 2 -- python script.py"),
        (("-n", "0", "true"), 2, "sparkdl: --ranks must be at least 1, got 0."),
        (
            ("--transport", "mpi", "--wire", "bfloat16", "no-such-program"),
            2,
            "sparkdl: transport='mpi' sends float32 as it is; wire='bfloat16' needs another transport",
        ),
        (
            ("--timeout", "nan", "no-such-program"),
            2,
            "sparkdl: --timeout must be a positive number of seconds, at most 2000000; got nan",
        ),
        (("no-such-program",), 127, "sparkdl: no-such-program cannot be started: No such file or directory"),
    ],
)
def test_invalid_command_is_reported_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = run([*SPARKDL, "run", *arguments], cwd=tmp_path, variables={})
    assert (done.returncode, done.stderr) == (status, f"{message}\n")


def test_a_machine_without_loopback_is_told_how_to_get_it(tmp_path: Path) -> None:
    command = ["unshare", "--net", *SPARKDL, "run", "--", "true"]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=500
    )
    if "unshare" in done.stderr:
        pytest.skip(f"no network can be made here: {done.stderr.strip()}")
    assert done.returncode == 1
    assert "ip link set lo up" in done.stderr
    assert "Traceback" not in done.stderr
