"""The spec of a launch, which crosses from the driver to every barrier task as a frozen object in Spark's closure."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.rendezvous.addresses import Address
from sparkdl.rendezvous.handshake import new_secret
from sparkdl.versions import package_versions

COMPARED_PACKAGES = ("sparkdl", "torch", "numpy", "cloudpickle")
"""Packages whose objects travel between driver and ranks, so that their versions have to agree."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Times after which a rank counts as hanging.

    Attributes:
        hang_timeout_s: seconds without progress, or in an operation; infinite for never.
        operation_timeout_s: default deadline of operations, in seconds; an operation with a longer deadline of its own
            may take as long as that deadline.
        silence_timeout_s: seconds without a heartbeat of a rank or its task.
    """

    hang_timeout_s: float
    operation_timeout_s: float
    silence_timeout_s: float


def installed_versions() -> dict[str, str]:
    """Versions of Python and of :data:`COMPARED_PACKAGES` in this process's environment, without importing them."""
    python = ".".join(platform.python_version_tuple()[:2])
    missing = dict.fromkeys(COMPARED_PACKAGES, "not installed")
    return {"python": python, **missing, **package_versions(COMPARED_PACKAGES)}


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """Everything a barrier task needs to start its rank."""

    job: str = field(default_factory=lambda: f"sparkdl-{secrets.token_hex(8)}")
    """Name of this launch, and the Spark tag of its job, for cancelling."""

    num_ranks: int

    secret: bytes = field(default_factory=new_secret, repr=False)
    """Proves to every listener of the job that a peer belongs to it. Travels only in Spark's closure."""

    payload: bytes = field(default=b"", repr=False)
    """The pickled function with its arguments; empty if the ranks run a program."""

    transport: str
    """Transport of the communicator: one of :data:`sparkdl.collective.TRANSPORTS`."""

    wire: str
    """Data type in which the communicator sends sums and averages of float32 between hosts."""

    gpus_per_rank: int = 0

    num_threads: int | None
    """Number of threads of each rank that the user chose; None for the cores of a task."""

    mpi: bool = False
    """Whether the ranks form an MPI world even if the transport is not MPI, for code that uses mpi4py."""

    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables that are set for the rank processes only."""

    modules: tuple[str, ...] = ()
    """Modules that the forkserver imports; see :mod:`sparkdl.launch.forkserver.process`."""

    versions: Mapping[str, str] = field(default_factory=installed_versions)
    """Versions on the driver, compared with those of every executor."""

    start_timeout_s: float = 300.0
    """How long tasks wait for tasks that have not started."""

    limits: HangLimits

    driver: Address | None = None
    """Address at which the driver receives log lines, events and failures; set when it listens there."""

    roster: Address | None = None
    """Address of the rendezvous of an elastic launch, in which this launch is one member; None for any other."""

    member: int = 0
    """Number of the member in an elastic launch."""

    @property
    def is_alone(self) -> bool:
        """Whether this launch has one task, which needs no other one to begin: a member of one rank."""
        return self.roster is not None and self.num_ranks == 1


def version_conflicts(driver: Mapping[str, str], executor: Mapping[str, str]) -> list[str]:
    """Return where an executor's versions differ from the driver's in a way that breaks pickles between them.

    Python, numpy and torch have to agree in their first two version numbers, sparkdl and cloudpickle entirely. A
    package that the driver does not have is ignored: no object of it can be sent.
    """
    conflicts = []
    for package, on_driver in driver.items():
        on_executor = executor.get(package, "not installed")
        exact = package in ("sparkdl", "cloudpickle")
        same = on_driver == on_executor if exact else _release(on_driver) == _release(on_executor)
        if on_driver != "not installed" and not same:
            conflicts.append(f"{package} is {on_driver} on the driver and {on_executor} on the executor")
    return conflicts


def _release(version: str) -> list[str]:
    return version.split("+", maxsplit=1)[0].split(".")[:2]
