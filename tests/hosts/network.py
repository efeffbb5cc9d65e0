"""Simulated hosts of one machine on one switch: the ``place`` of ``run_ranks`` for ranks on several hosts.

Each host is a network namespace with its own ``/dev/shm``. Its cable is a veth pair to a bridge in another namespace,
limited in both directions by a token bucket (``tc``'s tbf), and optionally delayed.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from sparkdl.bench.namespaces import Namespace, configure, limit, why_impossible
from tests.hosts.delay_line import DelayLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager


class Network:
    """Hosts with their ranks, numbered host by host; made by :func:`hosts_with_ranks`."""

    def __init__(self, switch: Namespace, hosts: Sequence[Namespace], ranks_per_host: Sequence[int]) -> None:
        self._switch = switch
        self._hosts = tuple(hosts)
        self.host_of_rank = tuple(
            host for host, num_ranks in enumerate(ranks_per_host) for _ in range(num_ranks)
        )

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return len(self.host_of_rank)

    def command(self, rank: int) -> list[str]:
        """The prefix of a rank's command line that runs it on its host."""
        return self._hosts[self.host_of_rank[rank]].command()

    def inside(self) -> AbstractContextManager[None]:
        """A context in which a new coordinator listens on the first host."""
        return self._hosts[0].entered()

    def cut_command(self, host: int) -> list[str]:
        """The command that cuts a host's cable; it must be run as root, on any of the hosts."""
        return self._set_port(host, "down")

    def mend_command(self, host: int) -> list[str]:
        """The command that reverts :meth:`cut_command`."""
        return self._set_port(host, "up")

    def _set_port(self, host: int, state: str) -> list[str]:
        return [*self._switch.command(), "ip", "link", "set", f"port{host}", state]


@contextmanager
def hosts_with_ranks(
    *ranks_per_host: int,
    gigabits_per_s: float | None = None,
    delay_s: float = 0.0,
    family: int = 4,
    decoy: bool = False,
) -> Iterator[Network]:
    """Make as many hosts as there are arguments; skip the test where that is not possible.

    Args:
        ranks_per_host: number of ranks of each host.
        gigabits_per_s: rate of each cable in each direction; unlimited when None.
        delay_s: delay in seconds of a packet in a host's cable, in each direction.
        family: 4 or 6, the IP version of the hosts' addresses.
        decoy: whether all hosts have an additional address that is the same for all, like those of container bridges.
    """
    if reason := why_impossible():
        pytest.skip(reason)
    with ExitStack() as stack:
        switch = stack.enter_context(Namespace())
        hosts = [stack.enter_context(Namespace()) for _ in ranks_per_host]
        configure(switch, ["link add switch0 type bridge mcast_snooping 0", "link set switch0 up"])
        for number, host in enumerate(hosts):
            if delay_s:
                stack.enter_context(DelayLine(host, "eth0", switch, f"port{number}", delay_s=delay_s))
            else:
                configure(switch, [f"link add port{number} type veth peer name eth0 netns {host.pid}"])
            configure(switch, [f"link set port{number} master switch0", f"link set port{number} up"])
            configure(host, ["link set lo up", *_decoy(decoy), *_addresses(number, family)])
            if gigabits_per_s is not None:
                limit(switch, f"port{number}", gigabits_per_s)
                limit(host, "eth0", gigabits_per_s)
        yield Network(switch, hosts, ranks_per_host)


def _addresses(number: int, family: int) -> list[str]:
    address = f"10.77.0.{number + 1}/24" if family == 4 else f"fd77::{number + 1}/64"
    # nodad disables the check for duplicates, which would make an IPv6 address unusable for a second.
    return [f"address add {address} dev eth0{' nodad' if family == 6 else ''}", "link set eth0 up"]


def _decoy(wanted: bool) -> list[str]:
    if not wanted:
        return []
    return [
        "link add decoy0 type bridge",
        "address add 172.17.0.1/16 dev decoy0",
        "link set decoy0 up",
    ]
