"""The libraries that a benchmark compares, each in ranks of its own, and the environment of these ranks.

Runs where the benchmark was called; :mod:`sparkdl.bench.contenders.sessions` is the part that runs on the ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
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
        advice: what to do if the package, the extension or the file is missing; to install the package if empty.
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
            return (
                f"{self.requires} is not installed; {self.advice or f'pip install {self.requires} brings it'}"
            )
        if self.file is not None and not self.file.exists():
            return f"{self.file} is missing; {self.advice}"
        return None


_DATA_ADVICE = "pip install petastorm==0.12.1 pyarrow pandas brings it"
# Ranks that benchmarks start here keep freed memory, as ranks of sparkdl do, unless the user has set how.
_TORCH = Library(requires="torch", variables=ALLOCATOR_VARIABLES)
_ARROW = Library(requires="pyarrow", advice=_DATA_ADVICE)
_MPI = Library(
    requires="mpi4py",
    advice="pip install mpi4py mpich brings it",
    variables=ALLOCATOR_VARIABLES,
    is_mpi=True,
)
_HOROVOD = Library(
    requires="horovod",
    extension="torch/mpi_lib_v2*.so",
    advice="it has to be built for the installed torch, with HOROVOD_WITH_PYTORCH=1 and HOROVOD_WITH_GLOO=1",
    variables=ALLOCATOR_VARIABLES,
    is_horovod=True,
    is_stopped_when_idle=True,
)

# Its libmpi.so.12 goes by the name of that of the mpich wheel, so it has a folder of its own.
_INTEL_MPI = Path(sys.prefix) / "impi"

LIBRARIES: dict[str, Library] = {
    "native": Library(),
    "torch": _TORCH,
    "torch nccl": _TORCH,
    "own nccl": _TORCH,
    "drop-in": _TORCH,
    "gloo": _TORCH,
    # One Gloo device per entry: with several of them it uses several connections at once.
    "gloo tuned": replace(_TORCH, variables={**ALLOCATOR_VARIABLES, "GLOO_SOCKET_IFNAME": "lo,lo,lo,lo"}),
    "mpi": _MPI,
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
    "gloo and mpi": _MPI,
    "horovod": _HOROVOD,
    # Readers: one process each, so that they share neither memory nor threads. The reader of sparkdl has the
    # environment of a rank; the others keep the defaults of Arrow, which suit them better.
    "feed": Library(requires="petastorm", advice=_DATA_ADVICE, variables=ALLOCATOR_VARIABLES),
    "feed of petastorm": Library(requires="petastorm", advice=_DATA_ADVICE),
    "feed of arrow": _ARROW,
    "feed of read_table": _ARROW,
    "feed of torch": _ARROW,
    "feed of datasets": Library(requires="datasets"),
    "feed of streaming": Library(requires="streaming", advice="pip install mosaicml-streaming brings it"),
    "spark": Library(requires="pyspark"),
    # The contenders of whole fits start their own ranks, in Spark.
    "fit": Library(requires="petastorm", advice="pip install pyspark torch petastorm==0.12.1 brings it"),
    "fit of pyspark": Library(requires="pyspark", extension="ml/torch/__init__.py"),
    "fit of horovod": _HOROVOD,
}
"""Libraries by name. ``torch`` is the c10d backend of sparkdl, ``drop-in`` is ``sparkdl.horovod.torch``."""


def names_of(
    text: str, known: Collection[str], option: str, *, separator: str = ",", least: int = 0
) -> list[str]:
    """Return the names in a list of at least ``least`` names.

    Raises:
        ParamError: if a name is unknown, or there are fewer.
    """
    names = [name.strip() for name in text.split(separator) if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or len(names) < least:
        problem = f"{','.join(unknown)} is unknown" if unknown else "names none"
        raise ParamError(f"{option} {problem}; it may be any of {f'{separator} '.join(known)}.")
    return names


def require(benchmark: str, *names: str) -> None:
    """Check that libraries can be used here without which a benchmark measures nothing.

    Raises:
        ParamError: if one cannot.
    """
    for name in names:
        if reason := LIBRARIES[name].why_missing():
            raise ParamError(f"sparkdl bench {benchmark}: {reason}")


def split_missing(libraries: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the contenders whose libraries can be used here, with them, and the reasons why the others cannot run."""
    reasons = {contender: LIBRARIES[library].why_missing() for contender, library in libraries.items()}
    missing = {contender: reason for contender, reason in reasons.items() if reason is not None}
    return {name: library for name, library in libraries.items() if name not in missing}, missing


Inherited = tuple[dict[str, str], tuple[int, ...]]
"""The environment variables and file descriptors that one rank inherits."""


@contextmanager
def rank_variables(
    library: Library, world_size: int, coordinator: Coordinator, secret: bytes
) -> Iterator[list[Inherited]]:
    """Yield what each rank of a library is started with; end the servers that the ranks need when the block ends."""
    # Several threads of one rank would take the cores of the other ranks.
    kept = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    base = {**os.environ, "OMP_NUM_THREADS": "1", **library.variables, **kept}
    with ExitStack() as stack:
        if library.is_mpi:
            yield [
                _mpi_variables(base, rank, world_size, coordinator, secret, stack)
                for rank in range(world_size)
            ]
        elif library.is_horovod:
            yield [({**base, **variables}, ()) for variables in _horovod_variables(world_size, stack)]
        else:
            yield [(base, ())] * world_size


def _mpi_variables(
    base: Mapping[str, str],
    rank: int,
    world_size: int,
    coordinator: Coordinator,
    secret: bytes,
    stack: ExitStack,
) -> Inherited:
    ours, theirs = socket.socketpair()
    stack.callback(theirs.close)
    client = stack.enter_context(RendezvousClient.connect(coordinator.address, secret, _CONNECT_TIMEOUT_S))
    server = PmiServer(
        ours, client, rank, world_size, host_of_rank=[0] * world_size, timeout_s=_CONNECT_TIMEOUT_S
    )
    stack.enter_context(server)
    return {**base, **pmi_environment(theirs.fileno(), rank, world_size)}, (theirs.fileno(),)


def _horovod_variables(world_size: int, stack: ExitStack) -> list[dict[str, str]]:
    """Return the variables of each rank as ``horovodrun --gloo`` sets them, for the loopback interface."""
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
    names = ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return [
        {**shared, **{f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in names}}
        for slot in slots
    ]
