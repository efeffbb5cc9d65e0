"""Opening NCCL over a communicator: the library, the GPU of each rank, the unique id, and the ranks' errors.

This module finds the library; ``sparkdl._native.NcclLibrary`` opens it, and lists the functions that it needs.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl import _native
from sparkdl._native import NcclCommunicator
from sparkdl.collective.byte_exchange import allgather_bytes, broadcast_bytes
from sparkdl.collective.nccl.group import NcclGroup
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

    from sparkdl._native import NcclLibrary
    from sparkdl.collective.communicator import Communicator


logger = logging.getLogger(__name__)

LIBRARY_VARIABLE = "SPARKDL_NCCL_LIBRARY"
"""Environment variable with the path of the NCCL library to use."""

SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own environment variable: 1 lets ranks share a GPU, from NCCL 2.30 on."""

_SHARING_SINCE = (2, 30)
_SONAME = "libnccl.so.2"
_DRIVER = "libcuda.so.1"


def load_nccl() -> _native.NcclLibrary:
    """Load NCCL: from the path in ``SPARKDL_NCCL_LIBRARY`` if set, else the ``nvidia-nccl-cu*`` wheel, else the system.

    Another call for the same library returns the same object.

    Raises:
        TransportUnavailableError: if it cannot be loaded or is too old, or there is no NVIDIA driver; the message says
            what was tried and what to install.
    """
    path = os.environ.get(LIBRARY_VARIABLE)
    return _load((path,) if path else (*_in_wheel(), _SONAME))


@cache
def _load(candidates: tuple[str, ...]) -> _native.NcclLibrary:
    try:
        library = _native.NcclLibrary(list(candidates), [_DRIVER])
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
    timeout_s = communicator.timeout_s if timeout_s is None else timeout_s
    deadline = Deadline(timeout_s)
    loaded, facts = _look_at_own(gpu)
    published = allgather_bytes(
        communicator, json.dumps(facts).encode(), name="GPUs for NCCL", timeout_s=deadline.remaining_s()
    )
    _check_ranks([json.loads(text) for text in published])
    assert loaded is not None, "a rank without NCCL has been refused"
    unique_id = _share_unique_id(communicator, loaded, max(_LOOK_S, deadline.remaining_s()))
    name = f"{communicator.name}/nccl"
    core, failure = _begin(communicator, loaded, unique_id, gpu, name, deadline)
    outcomes = allgather_bytes(
        communicator,
        failure.encode(),
        name="outcomes of NCCL",
        timeout_s=deadline.remaining_s() + _OUTCOME_S,
    )
    failures = [outcome.decode() for outcome in outcomes]
    if core is None or any(failures):
        if core is not None:
            core.abort("another rank could not open it")
        raise _opening_error(failures, timeout_s)
    return NcclGroup(core, communicator, gpu=gpu, name=name, timeout_s=timeout_s)


def may_share_gpus() -> bool:
    """Return whether this process's environment lets ranks share a GPU in NCCL."""
    return os.environ.get(SHARING_VARIABLE) == "1"


def find_shared_gpus(gpus: Sequence[str]) -> dict[str, list[int]]:
    """Return the GPUs that more than one rank has, with these ranks.

    Args:
        gpus: identity of every rank's GPU, in order of rank.
    """
    return {gpu: ranks for gpu, ranks in group_ranks(enumerate(gpus)).items() if len(ranks) > 1}


def _look_at_own(gpu: int) -> tuple[NcclLibrary | None, dict[str, Any]]:
    """Return this rank's library, and what to publish about it and the GPU; on failure None, and the error."""
    try:
        loaded = load_nccl()
        uuid, bus_id = loaded.gpu_id(gpu)
    except (SparkdlError, ValueError) as error:
        return None, {"kind": type(error).__name__, "error": str(error)}
    return loaded, {
        "version": loaded.version,
        "path": loaded.path,
        "gpu": uuid,
        "bus": bus_id,
        "may_share": may_share_gpus(),
    }


def _check_ranks(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise the same error on all ranks unless NCCL can be opened over them."""
    errors = {rank: published["error"] for rank, published in enumerate(ranks) if "error" in published}
    if errors:
        kinds = {published.get("kind") for published in ranks} - {None}
        text = name_groups(errors.items())
        if kinds == {TransportUnavailableError.__name__}:
            raise TransportUnavailableError(text)
        raise ParamError(text)
    versions = sorted({published["version"] for published in ranks})
    if len(versions) > 1:
        text = name_groups(
            (rank, f"{published['version']} ({published['path']})") for rank, published in enumerate(ranks)
        )
        raise CommunicatorError(f"all ranks need the same version of NCCL, but have: {text}")
    shared = find_shared_gpus([published["gpu"] for published in ranks])
    version = tuple(int(part) for part in versions[0].split("."))
    if shared and not (version >= _SHARING_SINCE and all(published["may_share"] for published in ranks)):
        who = "; ".join(f"{name_ranks(members)} share {gpu}" for gpu, members in shared.items())
        raise ParamError(
            f"NCCL needs a GPU for every rank, but {who}. Give every rank a GPU of its own, or let them communicate"
            f" through host memory. NCCL 2.30 and later can run several ranks on one GPU if {SHARING_VARIABLE}=1 on all"
            f" ranks; this is NCCL {versions[0]}."
        )


def _share_unique_id(communicator: Communicator, library: NcclLibrary, timeout_s: float) -> bytes:
    """Return the id that rank 0 creates; if that fails, raise its error on all ranks."""
    published: dict[str, str] = {}
    if communicator.rank == 0:
        try:
            published = {"id": library.unique_id().hex()}
        except CommunicatorError as error:
            published = {"error": str(error)}
    published = json.loads(
        broadcast_bytes(
            communicator, json.dumps(published).encode(), root=0, name="id of NCCL", timeout_s=timeout_s
        )
    )
    if "error" in published:
        raise CommunicatorError(f"rank 0: {published['error']}")
    return bytes.fromhex(published["id"])


def _begin(
    communicator: Communicator,
    library: NcclLibrary,
    unique_id: bytes,
    gpu: int,
    name: str,
    deadline: Deadline,
) -> tuple[NcclCommunicator | None, str]:
    """Open NCCL on this rank; return the open communicator, or None and the error.

    NCCL waits for all ranks. A rank that fails notifies the others through the rendezvous, so that they need not wait.
    """
    count = communicator.rendezvous.add(f"nccl/{name}/openings/{communicator.rank}", 1)
    news = communicator.rendezvous.view(f"nccl/{name}/{count}")
    core = None
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
        while not core.wait_ready(min(_LOOK_S, deadline.remaining_s())):
            if news.check(["failed"]):
                core.abort("another rank failed")
                return None, _GAVE_UP
            if communicator.failure is not None:
                core.abort(communicator.failure)
                return None, communicator.failure
            if deadline.expired:
                core.abort("not open in time")
                return None, _TOO_LATE
    except CommunicatorError as error:
        news.set("failed", str(error).encode())
        return None, str(error)
    return core, ""


_GAVE_UP = "gave up because another rank failed"
_TOO_LATE = "was still waiting for NCCL"


def _opening_error(failures: Sequence[str], timeout_s: float) -> CommunicatorError:
    causes = {rank: text for rank, text in enumerate(failures) if text and text not in (_GAVE_UP, _TOO_LATE)}
    if causes:
        return CommunicatorError(name_groups(causes.items()))
    late = [rank for rank, text in enumerate(failures) if text == _TOO_LATE]
    return CommunicatorTimeoutError(
        f"NCCL did not open within {timeout_s:g} s: {name_ranks(late)} still waited for it. Run with NCCL_DEBUG=INFO to"
        " see at what; often a network interface that the hosts cannot reach, to be named in NCCL_SOCKET_IFNAME."
    )
