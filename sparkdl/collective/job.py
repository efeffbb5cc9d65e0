"""The job that a rank belongs to, and the environment variables that say so. Runs on ranks and where they are started.

``sparkdl run`` sets the variables; how ranks of other launchers learn the same is in ``discovery``. Beside its own
variables each rank has those of ``torchrun``, so that programs which read these need no change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparkdl.collective.addresses import Address
from sparkdl.collective.deadline import check_timeout
from sparkdl.errors import LaunchError, ParamError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkdl.topology import Topology

RANK, WORLD_SIZE = "SPARKDL_RANK", "SPARKDL_WORLD_SIZE"
COORDINATOR, SECRET = "SPARKDL_COORDINATOR", "SPARKDL_SECRET"
JOB_VARIABLES = (RANK, WORLD_SIZE, COORDINATOR, SECRET)
"""What makes a process a rank of a job."""

TRANSPORT, WIRE, TIMEOUT_S = "SPARKDL_TRANSPORT", "SPARKDL_WIRE", "SPARKDL_TIMEOUT_S"

TORCHRUN_RUN_ID = "TORCHELASTIC_RUN_ID"

TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    TORCHRUN_RUN_ID,
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What ``torchrun`` tells a rank about its place, and :meth:`Job.to_torchrun_variables` too."""

_OWN_RUN = "sparkdl-"
"""How the run ids of our jobs begin, by which they are told from those of ``torchrun``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank has to know to find the others.

    Attributes:
        rank: number of the rank.
        world_size: how many ranks there are.
        coordinator: where the rendezvous is.
        secret: the job's secret.
        transport: what :func:`~sparkdl.collective.opening.open_communicator` is to open.
        wire: how that sends sums and averages of float32 between hosts.
        timeout_s: seconds for opening, and the default deadline of every operation.
    """

    rank: int
    world_size: int
    coordinator: Address
    secret: bytes = field(repr=False)
    transport: str = "auto"
    wire: str = "float32"
    timeout_s: float = 300.0

    def to_variables(self) -> dict[str, str]:
        """The environment variables of the rank's process; nobody but its user can read them."""
        return {
            RANK: str(self.rank),
            WORLD_SIZE: str(self.world_size),
            COORDINATOR: self.coordinator.to_bytes().decode(),
            SECRET: self.secret.hex(),
            TRANSPORT: self.transport,
            WIRE: self.wire,
            TIMEOUT_S: str(self.timeout_s),
        }

    def to_torchrun_variables(
        self, topology: Topology, *, is_alone: bool = False, restart_count: int = 0, max_restarts: int = 0
    ) -> dict[str, str]:
        """The environment variables of the same rank as ``torchrun`` sets them.

        ``MASTER_ADDR`` and ``MASTER_PORT`` are those of the coordinator, which serves holders of the job's secret
        alone: torch reaches it by :func:`sparkdl.torch.torchrun.rendezvous_by_environment`.

        Args:
            topology: which ranks share a host.
            is_alone: the rank sees none of what its host has but its own GPUs, as if it had the host to itself.
            restart_count: how often the ranks have been started again.
            max_restarts: how often they may be.
        """
        host, num_hosts = (self.rank, self.world_size) if is_alone else (topology.host, topology.num_hosts)
        values = (
            self.rank,
            self.world_size,
            0 if is_alone else topology.local_rank,
            1 if is_alone else topology.local_size,
            host,
            num_hosts,
            self.rank,
            self.world_size,
            "default",
            self.coordinator.hosts[0],
            self.coordinator.port,
            f"{_OWN_RUN}{self.coordinator.port}",
            restart_count,
            max_restarts,
            # Where a program names another MASTER_PORT, its rank 0 has to serve the store there.
            False,
        )
        return dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))

    def is_named_by(self, environ: Mapping[str, str]) -> bool:
        """Whether ``MASTER_ADDR`` and ``MASTER_PORT`` are those of this job's coordinator."""
        return self.is_at(environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"))

    def is_at(self, host: str | None, port: str | int | None) -> bool:
        """Whether this address is that of this job's coordinator."""
        hosts = {*self.coordinator.hosts, "localhost"}
        return str(port) == str(self.coordinator.port) and host in hosts

    @classmethod
    def from_variables(cls, environ: Mapping[str, str]) -> Job | None:
        """Decode what :meth:`to_variables` made; None if nothing of it is there.

        Raises:
            LaunchError: if some of it is missing or damaged; the message names the variables.
        """
        found = find_all(environ, JOB_VARIABLES, "Start ranks by `sparkdl run`, which sets all of them.")
        if found is None:
            return None
        rank, world_size, coordinator, secret = found
        try:
            job = cls(
                rank=int(rank),
                world_size=int(world_size),
                coordinator=Address.from_bytes(coordinator),
                secret=bytes.fromhex(secret),
            )
        except ValueError as error:
            raise LaunchError(f"{', '.join(JOB_VARIABLES)} do not describe a job: {error}") from error
        return job.with_choices_of(environ)

    def with_choices_of(self, environ: Mapping[str, str]) -> Job:
        """The same with the user's transport, wire format and timeout, where they are set.

        Raises:
            LaunchError: if the timeout is no number of seconds that can be waited for.
        """
        timeout_s = environ.get(TIMEOUT_S) or str(self.timeout_s)
        try:
            seconds = check_timeout(float(timeout_s), TIMEOUT_S)
        except ParamError as error:
            raise LaunchError(str(error)) from error
        except ValueError as error:
            raise LaunchError(f"{TIMEOUT_S}={timeout_s} is no number of seconds") from error
        return replace(
            self,
            transport=environ.get(TRANSPORT) or self.transport,
            wire=environ.get(WIRE) or self.wire,
            timeout_s=seconds,
        )


def is_torchruns(environ: Mapping[str, str]) -> bool:
    """Whether ``torchrun`` itself set its variables."""
    run_id = environ.get(TORCHRUN_RUN_ID)
    return bool(run_id) and not is_own_run(environ)


def is_own_run(environ: Mapping[str, str]) -> bool:
    """Whether the variables of ``torchrun`` are there because a rank of ours has them."""
    return environ.get(TORCHRUN_RUN_ID, "").startswith(_OWN_RUN)


def find_all(environ: Mapping[str, str], names: Sequence[str], advice: str) -> list[str] | None:
    """The values of variables that come together; None if none of them is set.

    Raises:
        LaunchError: if only some of them are; the message names the others.
    """
    there = [name for name in names if environ.get(name)]
    missing = [name for name in names if name not in there]
    if there and missing:
        raise LaunchError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set, but not {', '.join(missing)}. {advice}"
        )
    return [environ[name] for name in there] or None
