"""Ranks with GPUs on several hosts: NCCL inside each host, and one process set across hosts per local rank.

An array is divided into parts. The ranks with local rank p carry part p between the hosts, so that each byte leaves a
host once, regardless of the number of its ranks. There are as many parts as the smallest host has ranks; on larger
hosts, the ranks with higher local ranks carry no part.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sparkdl.collective.byte_exchange import agree, allgather_json
from sparkdl.collective.nccl.opening import open_nccl_group
from sparkdl.collective.watch import Watch
from sparkdl.errors import CommunicatorError, SparkdlError
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.topology import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.nccl.group import NcclGroup

_LOOK_S = 0.1
"""Pause between two checks for a failure of one of the groups."""

_NEWS_S = 1.0
"""How long to wait until the communicator of all ranks reports the rank that died."""

_OUTCOME_S = 20.0
"""Time after the deadline in which ranks exchange their results; longer than the same time in ``opening``."""


class Hierarchy:
    """The groups of one rank, which fail together: if one of them fails on any rank, all of them fail on all ranks.

    Created by :func:`open_hierarchy`.

    Attributes:
        all_ranks: communicator of all ranks; the caller closes it.
        inside: NCCL group of the ranks of this host.
        across: process set of the ranks with this local rank on all hosts; None if this rank carries no part.
        num_parts: number of parts into which an array is divided.
        is_even: whether all hosts have the same number of ranks.
    """

    def __init__(self, all_ranks: Communicator, inside: NcclGroup, across: Communicator | None) -> None:
        sizes = list(map(len, all_ranks.topology.ranks_by_host))
        self.all_ranks = all_ranks
        self.inside = inside
        self.across = across
        self.num_parts = min(sizes)
        self.is_even = len(set(sizes)) == 1
        self._is_origin = False  # whether this rank has aborted the others
        self._is_under_way = False
        self._watch = Watch(self._look, name=f"sparkdl-{all_ranks.name}-fate", pause_s=_LOOK_S)

    def rank_order(self) -> list[int]:
        """Return all ranks in order of local rank, then of host; all hosts must have the same number of ranks."""
        by_host = self.all_ranks.topology.ranks_by_host
        return [rank for ranks in zip(*by_host, strict=True) for rank in ranks]

    @contextmanager
    def one_fate(self) -> Iterator[None]:
        """Watch all groups during the ``with`` block, and raise the most precise error if one of them fails.

        Raises:
            CommunicatorError: if a group fails, or has failed before; the subclass says how.
        """
        if self.all_ranks.failure is not None:
            raise self.all_ranks.error()
        self._is_under_way = True
        self._watch.wake()
        try:
            yield
        except CommunicatorError as error:
            self._end_all(str(error))
            if self._is_origin:
                topology = self.all_ranks.topology
                raise type(error)(
                    f"{error} (Ranks are numbered inside this host, {list(topology.local_ranks)}, or across hosts,"
                    f" {list(topology.cross_ranks)}.)"
                ) from error
            raise self.all_ranks.error() from error
        except BaseException as error:
            # Operations begun inside the host cannot be undone: the ranks would no longer agree on the next operation.
            self._end_all(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._is_under_way = False

    def close(self) -> None:
        """Wait for operations under way, and close ``inside`` and ``across``. May be called again."""
        self._watch.close()
        self.inside.close()
        self.inside.communicator.close()
        if self.across is not None:
            self.across.close()

    def _look(self) -> bool:
        if not self._is_under_way:
            return False
        of_across = None if self.across is None else self.across.failure
        failure = self.all_ranks.failure or self.inside.failure or of_across
        if failure is not None:
            self._end_all(failure)
        return True

    def _end_all(self, reason: str) -> None:
        """Make all groups fail on all ranks.

        First waits a moment for the error of the communicator of all ranks, which names a lost or aborting rank.
        """
        if not self.all_ranks.has_failed_within(_NEWS_S):
            self._is_origin = True
            self.all_ranks.abort(reason)
        if self.across is not None and self.across.failure is None:
            self.across.abort(reason)
        if self.inside.failure is None:
            self.inside.abort(reason)


def open_hierarchy(all_ranks: Communicator, *, gpu: int, timeout_s: float | None = None) -> Hierarchy:
    """Open NCCL inside each host and process sets across hosts; all ranks must make this call.

    Args:
        all_ranks: communicator of the ranks, on several hosts. It fails together with the opened groups; its transport
            carries the data between hosts.
        gpu: number of this rank's GPU in this process; no two ranks of a host may have the same GPU.
        timeout_s: seconds for opening, and the deadline of NCCL's operations; the communicator's deadline when None.

    Raises:
        SparkdlError: if NCCL cannot be opened on this host (see
            :func:`~sparkdl.collective.nccl.opening.open_nccl_group`).
        CommunicatorError: if NCCL cannot be opened on another host; the message names the ranks there and the reason.
    """
    topology = all_ranks.topology
    deadline = Deadline(all_ranks.timeout_s if timeout_s is None else timeout_s)
    with ExitStack() as opened:
        local = all_ranks.split(topology.local_ranks, "inside")
        opened.callback(local.close)
        across = None
        if topology.local_rank < min(map(len, topology.ranks_by_host)):
            across = all_ranks.split(topology.cross_ranks, "across")
            opened.callback(across.close)
        insides: list[NcclGroup] = []

        def open_inside() -> None:
            insides.append(open_nccl_group(local, gpu=gpu, timeout_s=deadline.timeout_s))
            opened.callback(insides[0].close)

        def explain(failures: Mapping[int, Any]) -> CommunicatorError:
            texts = [
                f"on that of {name_ranks(ranks)}: {failures[failed[0]][1]}"
                for ranks in topology.ranks_by_host
                if (failed := [rank for rank in ranks if rank in failures])
            ]
            return CommunicatorError(f"NCCL could not be opened inside every host: {'; '.join(texts)}")

        agree(
            lambda outcome: allgather_json(
                all_ranks,
                outcome,
                name="NCCL inside hosts",
                timeout_s=deadline.remaining_s() + _OUTCOME_S,
            ),
            open_inside,
            explain,
            of=SparkdlError,
            raises_own=True,
        )
        opened.pop_all()
        return Hierarchy(all_ranks, insides[0], across)
