"""A cluster: its hosts, devices and links, and the time of a collective operation on them.

Each step of an operation takes alpha, plus its bytes over beta: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization
of Collective Communication Operations in MPICH" (2005). Rings move the fewest bytes; trees take the fewest steps. On
several hosts NCCL's rings cross every host, each device with its own share of the host's network; CPU ranks exchange
the shares of their hosts. The fewer hosts, the fewer bytes cross between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdl.errors import ParamError
from sparkdl.gpu_data_sheets import DATA_SHEETS, data_sheet_of

if TYPE_CHECKING:
    from sparkdl.planner.sums import SumTimes

GIB = float(1 << 30)

USABLE = 0.92
"""Share of a device's memory that a plan fills: CUDA's context and NCCL's buffers take about 2 GiB of 80, and the gaps
of torch's caching allocator some percent. The fullest of torchtitan's published runs takes 0.89
(benchmarks/llama3_h100_202412_torchtitan.md)."""


SUSTAINED = 0.8
"""Rate of matrix products in a long training as a share of their rate in a benchmark of milliseconds, which no power
limit slows down."""


STREAMED = 0.85
"""Share of a GPU's memory bandwidth that kernels reach which read and write long vectors."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that one rank computes on.

    Attributes:
        name: name of the device.
        peak: operations per second by its data sheet, of dense products in bfloat16 (float16 on V100 and T4).
        float32_peak: the same for float32.
        rate: operations per second that large matrix products reach.
        float32_rate: the same for float32; TF32 is not used, as torch does not by default.
        memory_bytes: bytes of memory.
        bandwidth: bytes per second of memory that the optimizer reaches.
        moved_rate: bytes per second that norms, activations and other kernels reach.
        attention_rate: operations per second that attention kernels reach.
        is_cpu: whether it is the cores of a rank.
        kernel_s: seconds that a matrix product takes besides its arithmetic: its start, its first loads and its last
            tile.
        tile_depth: depth of a product that takes as long as the first loads and the last stores of a tile.
        weights_rate: bytes per second at which a product also moves its weights or their gradients; it matters for few
            rows. Unlimited where the other figures were taken with many rows.
        block_s: seconds that the start of a block's other kernels takes, forward and backward.
        shared_by: number of ranks that take turns on the device; its rates are those of one of them while all compute.
            What one of them waits for, others use.
    """

    name: str
    peak: float
    float32_peak: float
    rate: float
    float32_rate: float
    memory_bytes: float
    bandwidth: float
    moved_rate: float
    attention_rate: float
    is_cpu: bool = False
    kernel_s: float = 7e-6
    tile_depth: float = 100.0
    weights_rate: float = math.inf
    block_s: float = 0.0
    shared_by: float = 1.0

    def copy_s(self, read: float, written: float) -> float:
        """Seconds of a copy that reads and writes so many bytes.

        A core also reads what it writes to, line by line of its caches (J. D. McCalpin, STREAM: "write allocate").
        """
        return (read + (2 if self.is_cpu else 1) * written) / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices.

    Attributes:
        name: name of the link.
        latency_s: alpha, seconds of a message without bytes.
        bytes_per_s: beta, bytes per second that a device reaches in each direction.
        occupies: share of a device's arithmetic that is lost while the link works. NCCL's kernels take 16 to 24 of the
            132 multiprocessors of an H100; CPU ranks copy with the cores that compute.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    occupies: float = 0.15


def _gpu(name: str, share: float, attention: float, gib: float, bandwidth: float) -> Device:
    sheet = DATA_SHEETS[name.removesuffix("-40gb")]
    return Device(
        name=name,
        peak=sheet.half,
        float32_peak=sheet.single,
        rate=sheet.half * share * SUSTAINED,
        float32_rate=sheet.single * share * SUSTAINED,
        memory_bytes=gib * GIB,
        bandwidth=bandwidth * STREAMED * 1e9,
        moved_rate=bandwidth * STREAMED * 1e9,
        attention_rate=sheet.half * attention,
    )


DEVICES = {
    device.name: device
    for device in (
        _gpu("v100", 0.75, 0.30, 31.7, 900),
        _gpu("t4", 0.50, 0.30, 14.6, 320),
        _gpu("l4", 0.60, 0.50, 22.0, 300),
        _gpu("l40s", 0.70, 0.50, 44.4, 864),
        _gpu("a100-40gb", 0.87, 0.55, 39.4, 1555),
        _gpu("a100", 0.87, 0.55, 79.3, 2039),
        _gpu("h100-pcie", 0.62, 0.36, 79.1, 2000),
        _gpu("h100", 0.81, 0.36, 79.1, 3350),
        _gpu("h200", 0.81, 0.36, 139.8, 4800),
    )
}
"""GPUs by name.

Peaks, memory and bandwidth are those of NVIDIA's data sheets (dense, without sparsity), memory without what the driver
takes. The share of the peak that large products reach is 0.87 on A100 and 0.80 on H100 in S. Bekman, "Machine Learning
Engineering" (maximum achievable matmul FLOPS). XLA's table of measured products has 0.79 on H100 and about 7 us more
for small ones; products of depth 2,048 and 1,024 take 3 and 8 percent longer than those of depth 4,096
(xla/service/gpu/model/matmul_interpolator_data.h). Attention is that of FlashAttention-2, which torch has: 0.5 to 0.73
of the peak on A100 forward and less backward (T. Dao, 2023), and about 350 TFLOP/s on H100 (J. Shah et al.,
"FlashAttention-3", 2024). The shares of the other GPUs, whose power limits bind earlier, are estimates."""


WITHOUT_BFLOAT16 = ("v100", "t4")
"""GPUs whose peak is that of float16."""


def known_gpu(name: str, memory_bytes: float) -> Device | None:
    """Return the entry of a GPU by the name that torch gives it and its memory; None if there is none."""
    sheet = data_sheet_of(name)
    fits = [
        device
        for device in DEVICES.values()
        if DATA_SHEETS[device.name.removesuffix("-40gb")] is sheet
        and abs(device.memory_bytes / memory_bytes - 1) < 0.1
    ]
    return fits[0] if fits else None


LINKS = {
    "nvlink2": Link(name="nvlink2", latency_s=1.9e-6, bytes_per_s=120e9),
    "nvlink3": Link(name="nvlink3", latency_s=1.9e-6, bytes_per_s=235e9),
    "nvlink4": Link(name="nvlink4", latency_s=1.9e-6, bytes_per_s=360e9),
    "pcie3": Link(name="pcie3", latency_s=4e-6, bytes_per_s=10e9),
    "pcie4": Link(name="pcie4", latency_s=4e-6, bytes_per_s=20e9),
    "pcie5": Link(name="pcie5", latency_s=4e-6, bytes_per_s=40e9),
    "memory": Link(name="memory", latency_s=2e-6, bytes_per_s=4e9, occupies=1.0),
}
"""Links inside of a host by name.

Rings reach 0.8 of a link's rate: 235 of 300 GB/s with NVLink 3, as nccl-tests shows (S. Bekman, "Machine Learning
Engineering", network); 360 of 450 with NVLink 4; about 0.65 of PCIe's. Latencies are those that NCCL uses to choose its
algorithms (src/graph/tuning.cc): of rings with its protocol LL128 for NVLink; for PCIe a figure between 2.5 us of that
protocol and 5.7 us of Simple. ``memory`` is the shared memory of CPU ranks, as ``sparkdl bench allreduce``
finds it on 2 cores; ``--measure`` measures it."""

INSIDE = {
    "v100": "nvlink2",
    "t4": "pcie3",
    "l4": "pcie4",
    "l40s": "pcie4",
    "a100-40gb": "nvlink3",
    "a100": "nvlink3",
    "h100-pcie": "pcie5",
    "h100": "nvlink4",
    "h200": "nvlink4",
}
"""The usual link inside of a host, by device."""


def link_of_sums(times: SumTimes, ranks: int, *, name: str, is_cpu: bool) -> Link:
    """Return the link on which sums over some ranks take these times."""
    (_, num_bytes), (small_s, large_s) = times.num_bytes, times.seconds
    steps, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    # Neither a latency that takes most of both times nor a pause during the small sum makes a link infinitely fast.
    rate = share * num_bytes / max(large_s - small_s, large_s / 2)
    occupies = min(1.0, times.cores) if is_cpu else Link.occupies
    return Link(
        name=f"{name} at {rate / GIB:.2g} GiB/s",
        latency_s=small_s / steps,
        bytes_per_s=rate,
        occupies=occupies,
    )


NETWORK_SHARE = 0.9
"""Share of a network's rate that large messages reach, after headers and flow control."""


def network(gbit_per_s: float, devices_per_host: int) -> Link:
    """Return the link of one device to other hosts, which the devices of a host share.

    From 100 Gbit/s on, where hosts have RDMA, its latency is NCCL's of a network (src/graph/tuning.cc, LL128), and that
    of TCP below.
    """
    bytes_per_s = NETWORK_SHARE * gbit_per_s / 8 * 1e9 / devices_per_host
    latency_s = 4e-6 if gbit_per_s >= 100 else 30e-6
    return Link(name=f"{gbit_per_s:g} Gbit/s", latency_s=latency_s, bytes_per_s=bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal hosts with equal devices.

    Attributes:
        hosts: number of hosts.
        devices_per_host: number of devices, and so of ranks, of each host.
        device: the devices.
        inside: link between devices of a host.
        between: link of a device to devices of other hosts, when all devices of the host use it at once.
    """

    hosts: int
    devices_per_host: int
    device: Device
    inside: Link
    between: Link

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    def group(self, stride: int, size: int) -> Group:
        """Return the group of every ``stride``-th rank, ``size`` in all; ranks are numbered host by host."""
        inside = max(1, min(size, self.devices_per_host // stride))
        return Group(cluster=self, inside=inside, hosts=math.ceil(size / inside))

    def __str__(self) -> str:
        return f"{self.hosts} x {self.devices_per_host} {self.device.name}, {self.inside.name}, {self.between.name}"


def make_cluster(
    device: Device | str,
    *,
    hosts: int = 1,
    devices_per_host: int = 8,
    inside: Link | str | None = None,
    between: Link | float | None = None,
    memory_gib: float | None = None,
) -> Cluster:
    """Return a cluster of devices and links that are named or given.

    Args:
        device: key of :data:`DEVICES`, or a device.
        hosts: number of hosts.
        devices_per_host: number of devices of each host.
        inside: key of :data:`LINKS`, or a link; the usual one of the device if None.
        between: gigabits per second of a host's network, over all of its interfaces; or the link of one device. If
            None, 50 for each device, or 10 for a host without GPUs.
        memory_gib: memory of a device, if it is not that of its data sheet.

    Raises:
        ParamError: if there is no such device or link, or a number is not positive.
    """
    if isinstance(device, str):
        if device not in DEVICES:
            raise ParamError(
                f"There is no device {device!r}; there are {', '.join(DEVICES)} and cpu. Others can be given as a "
                "sparkdl.planner.Device."
            )
        device = DEVICES[device]
    for name, number in (("hosts", hosts), ("devices_per_host", devices_per_host)):
        if not isinstance(number, int) or number < 1:
            raise ParamError(f"{name} of a cluster must be a positive number, got {number!r}.")
    if memory_gib is not None and not memory_gib > 0:
        raise ParamError(f"The memory of a device must be above 0 GiB, got {memory_gib:g}.")
    if memory_gib is not None:
        device = replace(device, memory_bytes=memory_gib * GIB)
    inside = inside or INSIDE.get(device.name, "memory" if device.is_cpu else "pcie4")
    if isinstance(inside, str):
        if inside not in LINKS:
            raise ParamError(f"There is no link {inside!r}; there are {', '.join(LINKS)}.")
        inside = LINKS[inside]
    if between is None:
        between = 10.0 if device.is_cpu else 50.0 * devices_per_host
    if not isinstance(between, Link):
        if not between > 0:
            raise ParamError(f"The network between hosts must have a rate above 0, got {between:g} Gbit/s.")
        between = network(between, devices_per_host)
    return Cluster(
        hosts=hosts, devices_per_host=devices_per_host, device=device, inside=inside, between=between
    )


_SLOW_NETWORK = 1.6e9
"""Bytes per second of a host below which gradients are worth rounding, about 14 Gbit/s."""


def advice_on_hosts(hosts: int, bytes_per_s: float, *, is_cpu: bool) -> list[str]:
    """Return how the ranks of several hosts had best communicate: transport, process sets and wire.

    Args:
        hosts: number of hosts.
        bytes_per_s: rate of the network of a host.
        is_cpu: whether ranks compute on cores.
    """
    if hosts < 16:
        texts = [
            "Below 16 hosts, the default transport does best, and process sets that are opened once, at the start."
        ]
    elif is_cpu:
        texts = [
            'From 16 hosts on, transport="mpi" joins hosts with fabrics that MPI knows, and dynamic process sets keep '
            "collectives among few hosts."
        ]
    else:
        texts = [
            "From 16 hosts on, NCCL joins the hosts by its trees, and dynamic process sets keep collectives among few "
            'hosts. Where MPI knows the fabric and NCCL does not, as between containers of several clouds, transport="'
            'hierarchical-mpi" keeps NCCL inside of the hosts: measure both.'
        ]
    if bytes_per_s < _SLOW_NETWORK:
        # NCCL alone sends float32.
        wire = 'wire="bfloat16"' if is_cpu else 'transport="hierarchical" with wire="bfloat16"'
        texts.append(
            f"On links this slow, {wire} halves what gradients send, and local updates send them seldom "
            "(docs/slow_links.md)."
        )
    return texts


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that communicate with each other, while all other ranks do the same in groups of their own.

    Attributes:
        cluster: cluster of the ranks.
        inside: number of ranks on each host.
        hosts: number of hosts.
    """

    cluster: Cluster
    inside: int
    hosts: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.inside * self.hosts

    def gather_s(self, num_bytes: float) -> float:
        """Seconds of an all-gather of ``num_bytes`` in all, or of a reduce-scatter, around a ring."""
        if self.size == 1 or num_bytes == 0:
            return 0.0
        near, far = self.cluster.inside, self.cluster.between
        latency_s = (self.inside - 1) * near.latency_s + (self.hosts - 1) * far.latency_s
        within, across = (self.inside - 1) / self.inside, (self.hosts - 1) / self.hosts
        if not self.cluster.device.is_cpu:  # each piece passes every link of NCCL's ring but one
            ring = (self.size - 1) / self.size
            within, across = ring * (self.inside > 1), ring * (self.hosts > 1)
        inside_s = num_bytes * within / near.bytes_per_s
        across_s = num_bytes / self.inside * across / far.bytes_per_s
        return latency_s + max(inside_s, across_s)  # pieces travel inside while others cross

    def reduce_s(self, num_bytes: float) -> float:
        """Seconds of an allreduce of ``num_bytes``, around a ring or along a tree, whichever is faster."""
        ring_s = 2 * self.gather_s(num_bytes)
        if self.size == 1 or num_bytes == 0:
            return 0.0
        near, far = self.cluster.inside, self.cluster.between
        steps_s = math.ceil(math.log2(self.inside)) * near.latency_s
        steps_s += math.ceil(math.log2(self.hosts)) * far.latency_s
        moved_s = max(
            num_bytes / near.bytes_per_s if self.inside > 1 else 0.0,
            num_bytes / self.inside / far.bytes_per_s if self.hosts > 1 else 0.0,
        )
        return min(ring_s, 2 * (steps_s + moved_s))

    def exchange_s(self, num_bytes: float) -> float:
        """Seconds of an all-to-all of ``num_bytes`` on each rank."""
        if self.size == 1:
            return 0.0
        near, far = self.cluster.inside, self.cluster.between
        latency_s = (self.inside - 1) * near.latency_s + (self.hosts - 1) * self.inside * far.latency_s
        inside_s = num_bytes * (self.inside - 1) / self.size / near.bytes_per_s
        across_s = num_bytes * (self.size - self.inside) / self.size / far.bytes_per_s
        return latency_s + max(inside_s, across_s)

    @property
    def link(self) -> Link:
        """The slowest link between the ranks."""
        return self.cluster.between if self.hosts > 1 else self.cluster.inside

    def send_s(self, num_bytes: float) -> float:
        """Seconds of a message from each rank to the next one in the group."""
        return 0.0 if self.size == 1 else self.link.latency_s + num_bytes / self.link.bytes_per_s
