"""The job that a rank belongs to, and the environment variables that say so. Runs on ranks and where they are started.

``sparkdl run`` sets the variables; how ranks of other launchers learn the same is in ``discovery``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparkdl.collective.addresses import Address
from sparkdl.collective.deadline import check_timeout
from sparkdl.errors import LaunchError, ParamError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RANK, WORLD_SIZE = "SPARKDL_RANK", "SPARKDL_WORLD_SIZE"
COORDINATOR, SECRET = "SPARKDL_COORDINATOR", "SPARKDL_SECRET"
TRANSPORT, WIRE, TIMEOUT_S = "SPARKDL_TRANSPORT", "SPARKDL_WIRE", "SPARKDL_TIMEOUT_S"


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

    @classmethod
    def from_variables(cls, environ: Mapping[str, str]) -> Job | None:
        """Decode what :meth:`to_variables` made; None if nothing of it is there.

        Raises:
            LaunchError: if some of it is missing or damaged; the message names the variables.
        """
        names = (RANK, WORLD_SIZE, COORDINATOR, SECRET)
        found = find_all(environ, names, "Start ranks by `sparkdl run`, which sets all of them.")
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
            raise LaunchError(f"{', '.join(names)} do not describe a job: {error}") from error
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
