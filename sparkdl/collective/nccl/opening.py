"""Opening NCCL over a communicator: the library, the GPU of each rank, the unique id, and the ranks' errors.

This module finds the library; ``sparkdl._native.NcclLibrary`` opens it, and lists the functions that it needs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.collective.byte_exchange import agree, allgather_json
from sparkdl.errors import (
    CommunicatorError,
    CommunicatorTimeoutError,
    ParamError,
    SparkdlError,
    TransportUnavailableError,
)
from sparkdl.rendezvous.deadline import Deadline
from sparkdl.topology import group_ranks, name_groups, name_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkdl._native import NcclCommunicator, NcclLibrary
    from sparkdl.collective.communicator import Communicator
    from sparkdl.collective.nccl.group import NcclGroup


logger = logging.getLogger(__name__)

LIBRARY_VARIABLE = "SPARKDL_NCCL_LIBRARY"
"""Environment variable with the path of the NCCL library to use."""

SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own environment variable: 1 lets ranks share a GPU, from NCCL 2.30 on."""

_SHARING_SINCE = (2, 30)
_SONAME = "libnccl.so.2"
_DRIVER = "libcuda.so.1"


def load_nccl() -> NcclLibrary:
    """Load NCCL: from the path in ``SPARKDL_NCCL_LIBRARY`` if set, else the ``nvidia-nccl-cu*`` wheel, else the system.

    Another call for the same library returns the same object.

    Raises:
        TransportUnavailableError: if it cannot be loaded or is too old, or there is no NVIDIA driver; the message says
            what was tried and what to install.
    """
    path = os.environ.get(LIBRARY_VARIABLE)
    return _load((path,) if path else (*_in_wheel(), _SONAME))


@cache
def _load(candidates: tuple[str, ...]) -> NcclLibrary:
    from sparkdl._native import NcclLibrary  # a served model runs without it

    try:
        library = NcclLibrary(list(candidates), [_DRIVER])
    except CommunicatorError as error:
        raise TransportUnavailableError(
            f"NCCL is not available: {error}. It needs an NVIDIA driver and NCCL 2.18 or later. Run: pip install"
            f" nvidia-nccl-cu12 (nvidia-nccl-cu13 for a driver of CUDA 13), or name a library in {LIBRARY_VARIABLE}."
        ) from error
    logger.info("NCCL %s from %s", library.version, library.path)
    return library


def _in_wheel() -> tuple[str, ...]:
    """Return the path of the library of the ``nvidia-nccl-cu*`` wheel, if that is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ()
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder) / "lib" / _SONAME for folder in folders or ()]
    return tuple(str(file) for file in files if file.exists())


_LOOK_S = 0.25
"""Pause between two checks for a failure of another rank, which NCCL does not report while it opens."""

_OUTCOME_S = 15.0
"""Time after the deadline in which ranks exchange their results, as the last rank may give up at the deadline."""


def open_nccl_group(
    communicator: Communicator,
    *,
    gpu: int,
    timeout_s: float | None = None,
) -> NcclGroup:
    """Open NCCL over the ranks of a communicator, each with a GPU of its own; all ranks must make this call.

    Ranks may share a GPU if NCCL is 2.30 or later and its ``NCCL_MULTI_RANK_GPU_ENABLE`` is 1 on all of them.

    Args:
        communicator: communicator of the ranks, over which they exchange what NCCL needs. The caller still closes it,
            but it fails together with the group from now on.
        gpu: number of this rank's GPU in this process.
        timeout_s: seconds for opening, and the deadline of operations; the communicator's deadline when None.

    Raises:
        TransportUnavailableError: if some rank has no NCCL, no GPU or no driver; the message names the ranks.
        ParamError: if ranks share a GPU that may not, or one asked for a GPU that it does not see.
        CommunicatorTimeoutError: if NCCL does not open in time.
        CommunicatorError: if some rank failed in any other way; the message names it and has NCCL's own text.
    """
    from sparkdl.collective.nccl.group import NcclGroup  # imports the extension

    timeout_s = communicator.timeout_s if timeout_s is None else timeout_s
    deadline = Deadline(timeout_s)
    _check_ranks(
        agree(
            lambda outcome: allgather_json(
                communicator, outcome, name="GPUs for NCCL", timeout_s=deadline.remaining_s()
            ),
            partial(_look_at_own, gpu),
            _finding_error,
            of=(SparkdlError, ValueError),
        )
    )
    library = load_nccl()
    timeout_of_id_s = max(_LOOK_S, deadline.remaining_s())
    unique_id, *_ = agree(
        partial(allgather_json, communicator, name="id of NCCL", timeout_s=timeout_of_id_s),
        lambda: library.unique_id().hex() if communicator.rank == 0 else "",
        lambda failures: CommunicatorError(name_groups(_texts(failures))),
        of=CommunicatorError,
    )
    name = f"{communicator.name}/nccl"
    opened: list[NcclCommunicator] = []
    try:
        agree(
            lambda outcome: allgather_json(
                communicator,
                outcome,
                name="outcomes of NCCL",
                timeout_s=deadline.remaining_s() + _OUTCOME_S,
            ),
            lambda: opened.append(
                _begin(communicator, library, bytes.fromhex(unique_id), gpu, name, deadline)
            ),
            partial(_opening_error, timeout_s=timeout_s),
            of=CommunicatorError,
        )
    except BaseException:
        for core in opened:
            _give_up(core)
        raise
    return NcclGroup(opened[0], communicator, gpu=gpu, name=name, timeout_s=timeout_s)


def may_share_gpus() -> bool:
    """Return whether this process's environment lets ranks share a GPU in NCCL."""
    return os.environ.get(SHARING_VARIABLE) == "1"


def find_shared_gpus(gpus: Sequence[str]) -> dict[str, list[int]]:
    """Return the GPUs that more than one rank has, with these ranks.

    Args:
        gpus: identity of every rank's GPU, in order of rank.
    """
    return {gpu: ranks for gpu, ranks in group_ranks(enumerate(gpus)).items() if len(ranks) > 1}


def shared_gpus_error(shared: Mapping[str, Sequence[int]], what: str, advice: str) -> ParamError:
    """Return the error for ranks that share GPUs where they may not.

    Args:
        shared: ranks that share a GPU, by the name of the GPU.
        what: what needs a GPU for every rank.
        advice: alternative to a GPU for every rank, and further sentences.
    """
    who = "; ".join(f"{name_ranks(ranks)} share {gpu}" for gpu, ranks in shared.items())
    return ParamError(
        f"{what} needs a GPU for every rank, but {who}. Give every rank a GPU of its own, or {advice}"
    )


def _look_at_own(gpu: int) -> dict[str, Any]:
    """Return what to publish about this rank's library and GPU."""
    loaded = load_nccl()
    uuid, bus_id = loaded.gpu_id(gpu)
    return {
        "version": loaded.version,
        "path": loaded.path,
        "gpu": uuid,
        "bus": bus_id,
        "may_share": may_share_gpus(),
    }


def _texts(failures: Mapping[int, Any]) -> list[tuple[int, str]]:
    return [(rank, text) for rank, (_, text) in failures.items()]


def _finding_error(failures: Mapping[int, Any]) -> SparkdlError:
    """Return the error for ranks that have no NCCL, or not the GPU that they asked for."""
    is_unavailable = {kind for kind, _ in failures.values()} == {TransportUnavailableError.__name__}
    return (TransportUnavailableError if is_unavailable else ParamError)(name_groups(_texts(failures)))


def _check_ranks(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise the same error on all ranks unless NCCL can be opened over them."""
    versions = sorted({published["version"] for published in ranks})
    if len(versions) > 1:
        text = name_groups(
            (rank, f"{published['version']} ({published['path']})") for rank, published in enumerate(ranks)
        )
        raise CommunicatorError(f"all ranks need the same version of NCCL, but have: {text}")
    shared = find_shared_gpus([published["gpu"] for published in ranks])
    version = tuple(int(part) for part in versions[0].split("."))
    if shared and not (version >= _SHARING_SINCE and all(published["may_share"] for published in ranks)):
        raise shared_gpus_error(
            shared,
            "NCCL",
            "let them communicate through host memory. NCCL 2.30 and later can run several ranks on one GPU if"
            f" {SHARING_VARIABLE}=1 on all ranks; this is NCCL {versions[0]}.",
        )


def _begin(
    communicator: Communicator,
    library: NcclLibrary,
    unique_id: bytes,
    gpu: int,
    name: str,
    deadline: Deadline,
) -> NcclCommunicator:
    """Open NCCL on this rank.

    NCCL waits for all ranks. A rank that fails notifies the others through the rendezvous, so that they need not wait.

    Raises:
        CommunicatorError: if it could not be opened.
    """
    from sparkdl._native import NcclCommunicator

    count = communicator.rendezvous.add(f"nccl/{name}/openings/{communicator.rank}", 1)
    news = communicator.rendezvous.view(f"nccl/{name}/{count}")
    with ExitStack() as unopened:
        try:
            core = NcclCommunicator(
                library=library,
                gpu=gpu,
                unique_id=unique_id,
                rank=communicator.rank,
                world_size=communicator.world_size,
                name=name,
                timeout_s=deadline.timeout_s,
            )
            unopened.callback(_give_up, core)
            while not core.wait_ready(min(_LOOK_S, deadline.remaining_s())):
                reason = _GAVE_UP if news.check(["failed"]) else communicator.failure
                if reason is None and deadline.expired:
                    reason = _TOO_LATE
                if reason is not None:
                    break
            else:
                unopened.pop_all()
                return core
        except CommunicatorError as error:
            news.set("failed", str(error).encode())
            raise
        raise CommunicatorError(reason)


def _give_up(core: NcclCommunicator) -> None:
    """Abort a communicator, and wait until NCCL has ended: errors keep the frames that hold it, so nothing drops it."""
    core.abort("some rank could not open it")
    core.close()


_GAVE_UP = "gave up because another rank failed"
_TOO_LATE = "was still waiting for NCCL"


def _opening_error(failures: Mapping[int, Any], timeout_s: float) -> CommunicatorError:
    texts = _texts(failures)
    causes = [(rank, text) for rank, text in texts if text not in (_GAVE_UP, _TOO_LATE)]
    if causes:
        return CommunicatorError(name_groups(causes))
    late = [rank for rank, text in texts if text == _TOO_LATE]
    return CommunicatorTimeoutError(
        f"NCCL did not open within {timeout_s:g} s: {name_ranks(late)} still waited for it. Run with NCCL_DEBUG=INFO to"
        " see at what; often a network interface that the hosts cannot reach, to be named in NCCL_SOCKET_IFNAME."
    )
