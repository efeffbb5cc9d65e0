"""Ranks that ``mpiexec`` starts find each other over any transport, and end together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.collective.checks.numeric_checks import CHECKS
from tests.launchers import find_mpi, run, told, write_script

REDUCE = """
import numpy
from sparkdl.collective import current_communicator
communicator = current_communicator()
array = numpy.full(3, communicator.rank + 1.0)
communicator.allreduce(array)
tell(communicator.rank, [communicator.transport, communicator.world_size, array.tolist()])
"""

CHECK = """
from sparkdl.collective import current_communicator
from tests.collective.checks.numeric_checks import check_communicator
communicator = current_communicator()
tell(communicator.rank, check_communicator(communicator))
"""

PROGRAMS = """
import sys
from random import Random
from sparkdl.collective import current_communicator
from tests.collective.scenes.program_runner import run_program
from tests.collective.scenes.programs import Scope, draw_program
communicator, random = current_communicator(), Random(sys.argv[1])
failures = []
for _ in range(int(sys.argv[2])):
    program = draw_program(random, communicator.world_size, Scope())
    failures += run_program(communicator, program, None, is_order_fixed=False).failures
    if failures:
        failures.append(repr(program))
        break
tell(communicator.rank, failures)
"""

FAIL = """
import numpy
from sparkdl.collective import current_communicator
communicator = current_communicator()
if communicator.rank == 1:
    mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/mpich_" in line}
    tell(1, sorted(mapped))
    raise ValueError("bad batch")
communicator.allreduce(numpy.ones(3))
tell(communicator.rank, "continued")
"""

libraries_and_transports = pytest.mark.parametrize(
    ("library", "transport"),
    [
        ("mpich", "mpi"),
        ("openmpi", "auto"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("mpich", "auto"), ("openmpi", "mpi"))),
    ],
)


def mpiexec(
    library: str, folder: Path, source: str, *arguments: object, ranks: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    mpi = find_mpi(library)
    script = write_script(folder, source)
    command = [*mpi.mpiexec, "-n", str(ranks), sys.executable, script, *map(str, arguments)]
    return run(command, cwd=folder, variables={**mpi.variables, **variables})


@libraries_and_transports
def test_ranks_find_each_other(tmp_path: Path, library: str, transport: str) -> None:
    done = mpiexec(library, tmp_path, REDUCE, SPARKDL_TRANSPORT=transport)
    assert done.returncode == 0, done.stderr
    expected = [{"auto": "native"}.get(transport, transport), 2, [3.0, 3.0, 3.0]]
    assert told(tmp_path) == {0: expected, 1: expected}
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str | None]]:
    """The outcomes of all checks on the ranks of one world with Open MPI; test_contract covers MPICH."""
    folder = tmp_path_factory.mktemp("openmpi")
    done = mpiexec("openmpi", folder, CHECK, ranks=3, SPARKDL_TRANSPORT="mpi", SPARKDL_TIMEOUT_S="20")
    found = told(folder)
    assert set(found) == {0, 1, 2}, done.stderr
    return found


@pytest.mark.slow  # random programs run over Open MPI daily
@pytest.mark.parametrize("check", CHECKS)
def test_open_mpi_agrees_with_numpy(outcomes: dict[int, dict[str, str | None]], check: str) -> None:
    for rank, outcome in outcomes.items():
        assert check in outcome, f"rank {rank} did not come so far: {list(outcome.items())[-1]}"
        assert outcome[check] is None, f"rank {rank}: {outcome[check]}"


def test_programs_over_open_mpi_do_what_numpy_does(tmp_path: Path) -> None:
    check_programs(tmp_path, seed=1, num_programs=30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_programs_over_open_mpi_do_what_numpy_does(tmp_path: Path, seed: int) -> None:
    check_programs(tmp_path, seed=seed, num_programs=150)


def check_programs(folder: Path, *, seed: int, num_programs: int) -> None:
    done = mpiexec(
        "openmpi", folder, PROGRAMS, seed, num_programs, SPARKDL_TRANSPORT="mpi", SPARKDL_TIMEOUT_S="20"
    )
    found = told(folder)
    assert set(found) == {0, 1}, done.stderr
    assert [failure for failures in found.values() for failure in failures] == []
    assert done.returncode == 0, done.stderr


@libraries_and_transports
def test_rank_that_fails_ends_the_others(tmp_path: Path, library: str, transport: str) -> None:
    done = mpiexec(library, tmp_path, FAIL, SPARKDL_TRANSPORT=transport)
    assert done.returncode != 0
    assert "ValueError: bad batch" in done.stderr
    # Whether rank 0 can still print its reason depends on how fast mpiexec ends it after it saw rank 1 exit.
    assert set(told(tmp_path)) == {1}, "rank 0 continued without rank 1"
    if (library, transport) == ("mpich", "mpi"):
        assert told(tmp_path)[1]
    assert not [name for name in told(tmp_path)[1] if Path(name).exists()]


@pytest.mark.parametrize(("starter", "library"), [("mpich", "openmpi"), ("openmpi", "mpich")])
def test_mpiexec_of_another_library_is_named(tmp_path: Path, starter: str, library: str) -> None:
    done = mpiexec(starter, tmp_path, REDUCE, MPI4PY_LIBMPI=str(find_mpi(library).library))
    assert done.returncode != 0
    assert "comes from another MPI than" in done.stderr
    assert "MPI4PY_LIBMPI" in done.stderr


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
        (
            {"SPARKDL_RANK": "0", "SPARKDL_SECRET": "00"},
            "SPARKDL_WORLD_SIZE, SPARKDL_COORDINATOR",
        ),
    ],
)
def test_variables_that_are_missing_are_named(tmp_path: Path, given: dict[str, str], missing: str) -> None:
    done = run([sys.executable, write_script(tmp_path, REDUCE)], cwd=tmp_path, variables=given)
    assert done.returncode == 1
    assert f"LaunchError: {', '.join(given)} " in done.stderr
    assert f" set, but not {missing}. Start ranks by " in done.stderr


def test_process_not_started_as_a_rank_has_no_communicator(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "from sparkdl.collective import current_communicator\ntell(0, current_communicator())"
    )
    done = run([sys.executable, script], cwd=tmp_path, variables={})
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {0: None}
