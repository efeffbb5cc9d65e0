"""The libraries that a benchmark compares, each in ranks of its own, and the environment of these ranks.

Runs where the benchmark was called; :mod:`sparkdl.bench.contenders.sessions` is the part that runs on the ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from sparkdl.collective import Coordinator, PmiServer, RendezvousClient, pmi_environment
from sparkdl.errors import ParamError
from sparkdl.launch.rank.environment import ALLOCATOR_VARIABLES

_CONNECT_TIMEOUT_S = 60.0

# The Gloo of Horovod gives up on a peer that does not answer for half a minute. The ranks of Horovod are stopped for
# longer than that while other contenders have their turns.
_HOROVOD_TIMEOUT_S = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library whose ranks are processes of their own.

    Attributes:
        requires: package that the library needs; None if it needs none.
        extension: pattern of a file that the package must contain; some packages can be installed without it.
        file: file outside of the package that the library needs; None if it needs none.
        advice: what to do if the package, the extension or the file is missing.
        variables: environment variables for the ranks.
        is_mpi: whether the ranks form one MPI world.
        is_horovod: whether the ranks connect by the rendezvous of Horovod.
        is_stopped_when_idle: whether the ranks are stopped while other contenders have their turns, because they use
            the processor between operations too.
    """

    requires: str | None = None
    extension: str = "__init__.py"
    file: Path | None = None
    advice: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    is_mpi: bool = False
    is_horovod: bool = False
    is_stopped_when_idle: bool = False

    def why_missing(self) -> str | None:
        """Return why the library cannot be used here; None if it can."""
        if self.requires is None:
            return None
        # Finding a package does not import it: the process that starts the ranks is better off without torch.
        package = find_spec(self.requires)
        folders = [] if package is None else package.submodule_search_locations or []
        if not any(True for folder in folders for _ in Path(folder).glob(self.extension)):
            return f"{self.requires} is not installed; {self.advice}"
        if self.file is not None and not self.file.exists():
            return f"{self.file} is missing; {self.advice}"
        return None


_TORCH_ADVICE = "pip install torch brings it"

_DATA_ADVICE = "pip install petastorm==0.12.1 pyarrow pandas brings it"

# Its libmpi.so.12 goes by the name of that of the mpich wheel, so it has a folder of its own.
_INTEL_MPI = Path(sys.prefix) / "impi"

LIBRARIES: dict[str, Library] = {
    "native": Library(),
    "torch": Library(requires="torch", advice=_TORCH_ADVICE),
    "torch nccl": Library(requires="torch", advice=_TORCH_ADVICE),
    "own nccl": Library(requires="torch", advice=_TORCH_ADVICE),
    "drop-in": Library(requires="torch", advice=_TORCH_ADVICE),
    "gloo": Library(requires="torch", advice=_TORCH_ADVICE),
    "gloo tuned": Library(
        requires="torch",
        advice=_TORCH_ADVICE,
        # One Gloo device per entry: with several of them it uses several connections at once.
        variables={"GLOO_SOCKET_IFNAME": "lo,lo,lo,lo"},
    ),
    "mpi": Library(requires="mpi4py", advice="pip install mpi4py mpich brings it", is_mpi=True),
    "intel mpi": Library(
        requires="mpi4py",
        file=_INTEL_MPI / "lib" / "libmpi.so.12",
        advice=f"pip install mpi4py, then pip install --no-deps --ignore-installed --prefix {_INTEL_MPI} impi-rt",
        # Without shared memory alone it looks for libfabric, which only several hosts need.
        variables={
            "MPI4PY_LIBMPI": str(_INTEL_MPI / "lib" / "libmpi.so.12"),
            "I_MPI_ROOT": str(_INTEL_MPI),
            "I_MPI_FABRICS": "shm",
        },
        is_mpi=True,
    ),
    # MPI sums the gradients of torch's DistributedDataParallel, which needs a process group for everything else.
    "gloo and mpi": Library(requires="mpi4py", advice="pip install mpi4py mpich brings it", is_mpi=True),
    "horovod": Library(
        requires="horovod",
        extension="torch/mpi_lib_v2*.so",
        advice="it has to be built for the installed torch, with HOROVOD_WITH_PYTORCH=1 and HOROVOD_WITH_GLOO=1",
        is_horovod=True,
        is_stopped_when_idle=True,
    ),
    # Readers: one process each, so that they share neither memory nor threads. The reader of sparkdl has the
    # environment of a rank; the others keep the defaults of Arrow, which suit them better.
    "feed": Library(requires="petastorm", advice=_DATA_ADVICE, variables=ALLOCATOR_VARIABLES),
    "feed of petastorm": Library(requires="petastorm", advice=_DATA_ADVICE),
    "feed of arrow": Library(requires="pyarrow", advice=_DATA_ADVICE),
    "feed of read_table": Library(requires="pyarrow", advice=_DATA_ADVICE),
    "feed of torch": Library(requires="pyarrow", advice=_DATA_ADVICE),
    "feed of datasets": Library(requires="datasets", advice="pip install datasets brings it"),
    "feed of streaming": Library(requires="streaming", advice="pip install mosaicml-streaming brings it"),
    "spark": Library(requires="pyspark", advice="pip install pyspark brings it"),
    # The contenders of whole fits start their own ranks, in Spark.
    "fit": Library(requires="petastorm", advice="pip install pyspark torch petastorm==0.12.1 brings it"),
    "fit of pyspark": Library(
        requires="pyspark", extension="ml/torch/__init__.py", advice="pip install pyspark brings it"
    ),
    "fit of horovod": Library(
        requires="horovod",
        extension="torch/mpi_lib_v2*.so",
        advice="it has to be built with HOROVOD_WITH_PYTORCH=1 and HOROVOD_WITH_GLOO=1 and to run on this Spark",
    ),
}
"""Libraries by name. ``torch`` is the c10d backend of sparkdl, ``drop-in`` is ``sparkdl.horovod.torch``."""


def names_of(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the names in a comma-separated list.

    Raises:
        ParamError: if a name is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ParamError(f"{option} {','.join(unknown)} is unknown; it may be any of {', '.join(known)}.")
    return names


def missing_contenders(libraries: Mapping[str, str]) -> dict[str, str]:
    """Return why contenders cannot run here, by contender, of those whose libraries are given by contender."""
    reasons = {contender: LIBRARIES[library].why_missing() for contender, library in libraries.items()}
    return {contender: reason for contender, reason in reasons.items() if reason is not None}


@dataclass(frozen=True, kw_only=True)
class RankVariables:
    """The environment variables and file descriptors that one rank inherits."""

    variables: dict[str, str]
    descriptors: tuple[int, ...] = ()


@contextmanager
def rank_variables(
    library: Library, world_size: int, coordinator: Coordinator, secret: bytes
) -> Iterator[list[RankVariables]]:
    """Yield what each rank of a library is started with; end the servers that the ranks need when the block ends."""
    # Several threads of one rank would take the cores of the other ranks.
    base = {**os.environ, "OMP_NUM_THREADS": "1", **library.variables}
    with ExitStack() as stack:
        if library.is_mpi:
            yield [
                _mpi_variables(base, rank, world_size, coordinator, secret, stack)
                for rank in range(world_size)
            ]
        elif library.is_horovod:
            yield _horovod_variables(base, world_size, stack)
        else:
            yield [RankVariables(variables=base) for _ in range(world_size)]


def _mpi_variables(
    base: Mapping[str, str],
    rank: int,
    world_size: int,
    coordinator: Coordinator,
    secret: bytes,
    stack: ExitStack,
) -> RankVariables:
    ours, theirs = socket.socketpair()
    stack.callback(theirs.close)
    client = stack.enter_context(RendezvousClient.connect(coordinator.address, secret, _CONNECT_TIMEOUT_S))
    server = PmiServer(
        ours, client, rank, world_size, host_of_rank=[0] * world_size, timeout_s=_CONNECT_TIMEOUT_S
    )
    stack.enter_context(server)
    variables = {**base, **pmi_environment(theirs.fileno(), rank, world_size)}
    return RankVariables(variables=variables, descriptors=(theirs.fileno(),))


def _horovod_variables(base: Mapping[str, str], world_size: int, stack: ExitStack) -> list[RankVariables]:
    """Return the variables as ``horovodrun --gloo`` sets them, for the loopback interface."""
    hosts = import_module("horovod.runner.common.util.hosts")
    slots = hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{world_size}"), world_size)
    server = import_module("horovod.runner.http.http_server").RendezvousServer()
    port = server.start()
    stack.callback(server.stop)
    server.init(slots)
    shared = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_HOROVOD_TIMEOUT_S),
    }
    return [
        RankVariables(
            variables={
                **base,
                **shared,
                "HOROVOD_HOSTNAME": str(slot.hostname),
                "HOROVOD_RANK": str(slot.rank),
                "HOROVOD_SIZE": str(slot.size),
                "HOROVOD_LOCAL_RANK": str(slot.local_rank),
                "HOROVOD_LOCAL_SIZE": str(slot.local_size),
                "HOROVOD_CROSS_RANK": str(slot.cross_rank),
                "HOROVOD_CROSS_SIZE": str(slot.cross_size),
            }
        )
        for slot in slots
    ]
