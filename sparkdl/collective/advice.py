"""Which transport and which process sets suit a cluster, and why. Pure reckoning; runs anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError
from sparkdl.topology import number_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

FABRICS = ("ethernet", "infiniband", "efa")

_ASSUMED_LINK = {"ethernet": 10e9 / 8, "infiniband": 200e9 / 8, "efa": 100e9 / 8}
"""Bytes per second of one host's link, where nothing was measured or said."""

_ASSUMED_MEMORY = 10e9
"""Bytes per second that one core copies while its neighbours copy, too."""

_FABRIC_SHARE = 0.9
"""How much of a link MPI and NCCL use where they drive it themselves."""

_PINNED_COPY = 20e9
"""Bytes per second from a GPU to pinned memory of its host, or back."""

_TCP_SHARE = {"ethernet": 0.85, "infiniband": 0.15, "efa": 0.3}
"""How much of a link a transport uses: TCP reaches fast fabrics only through the kernel (IPoIB, ENA)."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What suits a cluster.

    Attributes:
        transport: what to hand to :func:`~sparkdl.collective.open_communicator`.
        process_sets: ranks by name, for ``Communicator.split``: ``"host i"`` has the ranks of a host, for what
            exchanges much (tensor parallelism); ``"across i"`` the i-th rank of every host, for what exchanges
            little (data parallelism).
        seconds: estimated time of one allreduce of ``num_bytes`` over each transport that was considered; of CUDA
            tensors where each rank has a GPU and there are several hosts.
        reasons: why, one sentence each.
    """

    transport: str
    process_sets: Mapping[str, tuple[int, ...]]
    seconds: Mapping[str, float]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        estimates = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        sets = ", ".join(f"{name}: {list(ranks)}" for name, ranks in self.process_sets.items())
        return "\n".join(
            [f"transport={self.transport!r}", f"process sets: {sets or 'none'}", f"estimates: {estimates}"]
            + [f"- {reason}" for reason in self.reasons]
        )


def advise(
    hosts: Sequence[object],
    *,
    gpus_per_host: int = 0,
    fabric: str = "ethernet",
    has_mpi: bool = False,
    elastic: bool = False,
    num_bytes: int = 100_000_000,
    rates: Mapping[str, float] | None = None,
) -> Advice:
    """Say which transport and which process sets suit a cluster, and why.

    The estimates follow the alpha-beta model without its latency term: a ring moves ``2 (H - 1) / H`` of the
    data over every link, and inside a host a rank moves five times the data through memory (Thakur, Rabenseifner
    and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).

    Args:
        hosts: the host of every rank, by any name.
        gpus_per_host: GPUs that the ranks of a host may use; 0 for training on CPUs.
        fabric: ``"ethernet"``, ``"infiniband"`` or ``"efa"``.
        has_mpi: whether an MPI library that knows the fabric is installed on every host.
        elastic: whether ranks may come and go during training.
        num_bytes: gradients of one step.
        rates: measured bytes per second: ``"link"`` of one host's link by the fabric's own means, ``"tcp"`` of TCP over
            it, which is taken for a share of the link where it was not measured, and ``"memory"`` of one core that
            copies while its neighbours do.

    Raises:
        ParamError: if an argument has a value that cannot work.
    """
    if fabric not in FABRICS:
        raise ParamError(f"fabric={fabric!r} is unknown; it may be one of {', '.join(FABRICS)}")
    if not hosts:
        raise ParamError("hosts is empty: name the host of every rank")
    unknown = set(rates or {}) - {"link", "tcp", "memory"}
    if unknown:
        raise ParamError(f"rates has {sorted(unknown)}; it may have 'link', 'tcp' and 'memory'")
    _check_numbers(gpus_per_host, num_bytes, rates or {})
    host_of_rank = number_hosts(hosts)
    by_host = [
        tuple(rank for rank, other in enumerate(host_of_rank) if other == host)
        for host in range(max(host_of_rank) + 1)
    ]
    reasons: list[str] = []
    if gpus_per_host and len(by_host) > 1 and max(map(len, by_host)) <= gpus_per_host:
        seconds = _estimate_gpus(by_host, fabric, has_mpi and not elastic, num_bytes, rates or {})
        transport = _choose_for_gpus(fabric, seconds, reasons)
    else:
        seconds = _estimate(by_host, fabric, has_mpi, num_bytes, rates or {})
        transport = _choose(by_host, fabric, has_mpi, elastic, seconds, reasons)
        if gpus_per_host:
            reasons.append(_about_gpus(by_host, gpus_per_host))
    if rates:
        reasons.append("The estimates use the measured " + " and ".join(sorted(rates)) + ".")
    else:
        reasons.append(
            "Nothing was measured; the estimates assume typical rates. Measure with `sparkdl bench allreduce`."
        )
    return Advice(
        transport=transport, process_sets=_process_sets(by_host), seconds=seconds, reasons=tuple(reasons)
    )


def _check_numbers(gpus_per_host: int, num_bytes: int, rates: Mapping[str, float]) -> None:
    if not _is_finite(gpus_per_host) or gpus_per_host < 0 or gpus_per_host != int(gpus_per_host):
        raise ParamError(
            f"gpus_per_host={gpus_per_host!r} is no count; give how many GPUs the ranks of a host may use, 0 for none"
        )
    if not _is_finite(num_bytes) or num_bytes <= 0:
        raise ParamError(
            f"num_bytes={num_bytes!r} is no size; give the bytes of one step's gradients, more than 0 and finite"
        )
    for name, rate in rates.items():
        if not _is_finite(rate) or rate <= 0:
            raise ParamError(
                f"rates[{name!r}]={rate!r} is no rate; give bytes per second, more than 0 and finite, or leave"
                f" {name!r} out to assume a typical one"
            )


def _is_finite(value: object) -> bool:
    """Whether it is a number of Python or NumPy, and neither infinite nor NaN."""
    return isinstance(value, Real) and math.isfinite(value)


def _estimate(
    by_host: list[tuple[int, ...]], fabric: str, has_mpi: bool, num_bytes: int, rates: Mapping[str, float]
) -> dict[str, float]:
    memory = rates.get("memory", _ASSUMED_MEMORY)
    inside = 5 * num_bytes / (2 * memory) if max(map(len, by_host)) > 1 else 0.0
    by_tcp, by_fabric = _on_links(len(by_host), fabric, num_bytes, rates)
    estimates = {"native": inside + by_tcp}
    if len(by_host) > 1:
        # Without shared memory every rank of a host sends over its link.
        estimates["tcp"] = by_tcp * max(map(len, by_host)) + num_bytes / memory
    if has_mpi:
        estimates["mpi"] = 2 * inside + by_fabric
    return estimates


def _on_links(num_hosts: int, fabric: str, num_bytes: int, rates: Mapping[str, float]) -> tuple[float, float]:
    """Seconds that the bytes spend on the links between hosts: over TCP, and by what drives the fabric itself."""
    link = rates.get("link", _ASSUMED_LINK[fabric])
    tcp = rates.get("tcp", link * _TCP_SHARE[fabric])
    # Nothing but the kernel drives Ethernet, whoever asks it to.
    own = tcp if fabric == "ethernet" else link * _FABRIC_SHARE
    on_link = 2 * (num_hosts - 1) / num_hosts * num_bytes
    return on_link / tcp, on_link / own


def _estimate_gpus(
    by_host: list[tuple[int, ...]], fabric: str, has_mpi: bool, num_bytes: int, rates: Mapping[str, float]
) -> dict[str, float]:
    """What takes longer: the links, or the copies of a rank's part to host memory and back, which go on meanwhile."""
    by_tcp, by_fabric = _on_links(len(by_host), fabric, num_bytes, rates)
    copies = 2 * num_bytes / min(map(len, by_host)) / _PINNED_COPY
    # NCCL knows InfiniBand; EFA only with a plugin.
    estimates = {"auto": by_fabric if fabric == "infiniband" else by_tcp, "hierarchical": max(by_tcp, copies)}
    if has_mpi:
        estimates["hierarchical-mpi"] = max(by_fabric, copies)
    return estimates


def _choose_for_gpus(fabric: str, seconds: Mapping[str, float], reasons: list[str]) -> str:
    best = min(seconds, key=lambda name: seconds[name])
    if fabric == "infiniband" and best == "auto":
        reasons.append(
            f"NCCL drives infiniband itself, from GPU to GPU without the host: {seconds['auto'] * 1e3:.3g} ms."
        )
        return "auto"
    if best == "hierarchical-mpi":
        reasons.append(
            f"NCCL inside each host, and MPI, which drives {fabric}, once per byte across:"
            f" {seconds[best] * 1e3:.3g} ms against {seconds['hierarchical'] * 1e3:.3g} ms over TCP."
        )
    else:
        best = "hierarchical"
        reasons.append(
            f"NCCL inside each host, and TCP once per byte across: {seconds[best] * 1e3:.3g} ms, of which"
            " wire='bfloat16' saves half."
        )
        if fabric == "ethernet":
            reasons.append("NCCL would have no more than TCP between hosts either, but unauthenticated.")
        elif fabric == "infiniband":
            reasons.append(f"NCCL over {fabric} would take {seconds['auto'] * 1e3:.3g} ms.")
    if fabric == "efa":
        reasons.append(
            "NCCL reaches EFA with the plugin aws-ofi-nccl alone; where that is installed, use 'auto'."
        )
    return best


def _choose(
    by_host: list[tuple[int, ...]],
    fabric: str,
    has_mpi: bool,
    elastic: bool,
    seconds: Mapping[str, float],
    reasons: list[str],
) -> str:
    num_hosts = len(by_host)
    if num_hosts == 1:
        reasons.append(
            f"All {len(by_host[0])} ranks share one host, whose memory is the fastest way between them."
        )
        return "auto"
    if elastic:
        reasons.append(
            "Ranks may come and go: the native transport opens new communicators after a loss, while an MPI world"
            " cannot be used again."
        )
        return "auto"
    if not has_mpi and fabric != "ethernet":
        reasons.append(
            f"No MPI library was named that knows {fabric}, so TCP has to do, at a fraction of the link's rate."
        )
    if has_mpi and seconds["mpi"] < seconds["native"]:
        reasons.append(
            f"MPI drives {fabric} without the kernel: {seconds['mpi'] * 1e3:.3g} ms against"
            f" {seconds['native'] * 1e3:.3g} ms over TCP."
        )
        return "mpi"
    reasons.append(
        f"{num_hosts} hosts: shared memory inside each, and across them each byte once per host over TCP,"
        f" {seconds['native'] * 1e3:.3g} ms."
    )
    return "auto"


def _about_gpus(by_host: list[tuple[int, ...]], gpus_per_host: int) -> str:
    ranks = max(map(len, by_host))
    if ranks > gpus_per_host:
        return (
            f"{ranks} ranks on a host share {gpus_per_host} GPUs: NCCL refuses that, so their tensors go through host"
            f" memory. Use {gpus_per_host} ranks per host."
        )
    return "CUDA tensors go through NCCL whatever the transport, which carries the CPU's tensors and bootstraps NCCL."


def _process_sets(by_host: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    sets: dict[str, tuple[int, ...]] = {}
    if len(by_host) == 1:
        return sets
    for host, ranks in enumerate(by_host):
        if len(ranks) > 1:
            sets[f"host {host}"] = ranks
    if len({len(ranks) for ranks in by_host}) == 1 and len(by_host[0]) > 1:
        for position, across in enumerate(zip(*by_host, strict=True)):
            sets[f"across {position}"] = across
    return sets
