"""The arrangement of a job's ranks in a mesh, with one dimension for each kind of parallelism.

:class:`Parallelism` holds the sizes; :meth:`Parallelism.lay_out` places them on the ranks of the open process group and
returns a :class:`RankLayout` with a device mesh, whose dimensions are also process groups and communicators.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparkdl.errors import ParamError
from sparkdl.patches.mesh_caches import forget_meshes
from sparkdl.topology import number_hosts
from sparkdl.torch.process_group import SparkdlProcessGroup

if TYPE_CHECKING:
    from sparkdl.collective import Communicator

logger = logging.getLogger(__name__)

DIMENSIONS = ("pipeline", "data", "shard", "context", "tensor")
"""The dimensions of a mesh, outermost first: neighbors along the last ones communicate most, so they share a host."""

_INSIDE_A_HOST = ("tensor", "context", "shard")


SHARDING_STAGES = (1, 2, 3)
ATTENTION_METHODS = ("ring", "all-to-all")


@dataclass(frozen=True)
class Schedule:
    """A schedule of ``torch.distributed.pipelining``; :mod:`sparkdl.parallel.pipeline.schedules` has their sources.

    Attributes:
        name: its name in torch.
        stages_per_rank: number of stages of each rank.
        splits_backward: whether the gradients of weights are computed later than those of inputs.
        is_v: whether rank r of N has the stages r and 2 N - 1 - r, in place of r and N + r.
    """

    name: str
    stages_per_rank: int
    splits_backward: bool = False
    is_v: bool = False


SCHEDULES = {
    "gpipe": Schedule("GPipe", 1),
    "1f1b": Schedule("1F1B", 1),
    "interleaved-1f1b": Schedule("Interleaved1F1B", 2),
    "looped-bfs": Schedule("LoopedBFS", 2),
    "zero-bubble": Schedule("InterleavedZeroBubble", 2, splits_backward=True),
    "zbv": Schedule("ZBVZeroBubble", 2, splits_backward=True, is_v=True),
    "dualpipe-v": Schedule("DualPipeV", 2, splits_backward=True, is_v=True),
}
"""Schedules by name. All compute the same numbers; they differ in idle time and in the activations that they keep."""


def check_sharded_schedule(schedule: str) -> None:
    """Check that FSDP2 can shard the stages of a schedule.

    Raises:
        ParamError: if the schedule splits the backward pass. With torch 2.13 gradients would be wrong, as FSDP2 reduces
            them before all are computed.
    """
    if SCHEDULES[schedule].splits_backward:
        others = [name for name, other in SCHEDULES.items() if not other.splits_backward]
        raise ParamError(
            f"The schedule {schedule!r} splits the backward pass, which FSDP2 does not support. Use one of "
            f"{', '.join(others)}, or replicas of the stages: data in place of shard and context, and in a script "
            "average_gradients() in place of shard()."
        )


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes and options of the kinds of parallelism; the product of the sizes is the number of ranks.

    One size may be -1: it becomes the number of ranks divided by the product of the other sizes.

    Attributes:
        data: number of replicas of the model, which train on different rows. None for the number of ranks
            divided by the product of the other sizes, or 1 if another size is -1.
        shard: number of ranks that divide weights, gradients and optimizer state among them; they too train on
            different rows.
        tensor: number of ranks among which the weights and the arithmetic of each layer are divided.
        context: number of ranks that share the positions of each sequence.
        pipeline: number of ranks of a pipeline; each has some of the layers.
        sharding_stage: ZeRO stage of ``shard``; see :func:`sparkdl.parallel.shard`.
        sequence: whether tensor ranks also divide the activations between the divided layers.
        attention: method of ``context``; see :func:`sparkdl.parallel.share_sequences`.
        schedule: schedule of ``pipeline``; see :data:`sparkdl.parallel.SCHEDULES`.
        stage_blocks: number of blocks of each pipeline stage; None for stages with balanced numbers of weights.
        microbatches: number of microbatches into which a pipeline cuts a batch; None for the largest number up to four
            times ``pipeline`` that divides the rows.
        recompute: whether blocks keep only their inputs for the backward pass; see
            :func:`sparkdl.parallel.recompute_activations`.
        offload: whether the shards of weights, gradients and optimizer state lie in host memory, and a block's weights
            on the GPU only while it computes; see :func:`sparkdl.parallel.shard`.
        verify: whether the ranks check in every step that they were given the same rows, call the same layers and
            compute the same gradients where they must; False for never, None for the first step.
    """

    data: int | None = None
    shard: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    sharding_stage: int = 3
    sequence: bool = False
    attention: str = "ring"
    schedule: str = "1f1b"
    stage_blocks: Sequence[int] | None = None
    microbatches: int | None = None
    recompute: bool = False
    offload: bool = False
    verify: bool | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("sharding_stage", SHARDING_STAGES),
            ("attention", ATTENTION_METHODS),
            ("schedule", tuple(SCHEDULES)),
        ):
            self._check(name, " or ".join(map(repr, choices)), getattr(self, name) in choices)
        for name in ("sequence", "recompute", "offload"):
            self._check(name, "True or False", isinstance(getattr(self, name), bool))
        self._check("verify", "True, False or None", self.verify is None or isinstance(self.verify, bool))
        if self.stage_blocks is not None:
            is_list = isinstance(self.stage_blocks, Sequence)
            are_integers = is_list and all(isinstance(number, int) for number in self.stage_blocks)
            self._check("stage_blocks", "a list of whole numbers", are_integers)
            object.__setattr__(self, "stage_blocks", tuple(self.stage_blocks))  # jobs give a list
        if self.microbatches is not None:
            is_count = isinstance(self.microbatches, int) and self.microbatches >= 1
            self._check("microbatches", "a positive number", is_count)
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        for name, size in sizes.items():
            is_count = isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or size == -1)
            self._check(name, "a positive number or -1", is_count or (name == "data" and size is None))
        rest = [name for name, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise ParamError(
                f"Parallelism: only one size can be -1, got {' and '.join(rest)}. Give the others a number."
            )

    def _check(self, name: str, wanted: str, is_valid: bool) -> None:
        if not is_valid:
            raise ParamError(f"Parallelism: {name} must be {wanted}, got {getattr(self, name)!r}.")

    def resolve(self, world_size: int) -> Parallelism:
        """Return the sizes for a number of ranks, with None and -1 replaced by numbers.

        Raises:
            ParamError: if the product of the sizes cannot be the number of ranks (the message says which sizes would
                fit), or ``offload`` is set and nothing is sharded.
        """
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        if sizes["data"] is None:
            sizes["data"] = 1 if -1 in sizes.values() else -1
        open_name = next((name for name, size in sizes.items() if size == -1), None)
        product = math.prod(size for size in sizes.values() if size != -1)
        if open_name is not None and world_size % product == 0:
            sizes[open_name] = world_size // product
        elif open_name is not None or product != world_size:
            shown = (
                " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, -1))
                or "data 1"
            )
            total = f" = {product}" if " x " in shown else ""
            raise ParamError(
                f"Parallelism: {shown}{total} does not {'divide' if open_name else 'equal'} {world_size} "
                f"{'rank' if world_size == 1 else 'ranks'}. {_what_fits(product, world_size, open_name)}"
            )
        if self.offload and sizes["shard"] * sizes["context"] == 1:
            raise ParamError(
                "Parallelism: offload keeps the shards of a model in host memory, and shard is 1. Set it to the number "
                "of ranks that share the weights, or leave offload out."
            )
        return replace(self, **sizes)

    @property
    def num_ranks_of_replica(self) -> int:
        """Number of ranks among which each copy of the model is divided.

        Raises:
            ParamError: if it depends on the number of ranks, because a size other than ``data`` is -1.
        """
        sizes = {name: getattr(self, name) for name in DIMENSIONS if name != "data"}
        for name, size in sizes.items():
            if size == -1:
                raise ParamError(
                    f"Parallelism: {name} is -1, so that all ranks share one copy of the model. Give {name} a number."
                )
        return math.prod(sizes.values())

    def lay_out(
        self,
        *,
        device_type: str = "cpu",
        host_of_rank: Sequence[int] | None = None,
        by_replica: bool = False,
    ) -> RankLayout:
        """Arrange the ranks of the open process group by these sizes and open a group per dimension. Collective.

        Tensor, then context, then shard neighbors are placed on one host as far as it has room for them; data and
        pipeline neighbors are placed across hosts. A process may lay out its ranks several times; layouts of a default
        process group that was destroyed can no longer be used.

        Args:
            device_type: device type of the tensors, ``"cpu"`` or ``"cuda"``.
            host_of_rank: index of each rank's host. None for the hosts in the topology of the process group's
                communicator, or for a single host if the process group has a backend of torch.
            by_replica: whether ranks that follow each other have a copy of the model, wherever they are, so that they
                can live and end together.

        Raises:
            ParamError: if the sizes do not fit the number of ranks, or torch.distributed is not initialized.
        """
        if not dist.is_initialized():
            raise ParamError(
                "Parallelism.lay_out needs torch.distributed: call sparkdl.torch.init_process_group() or "
                "torch.distributed.init_process_group() first."
            )
        sizes = self.resolve(dist.get_world_size())
        forget_meshes(device_type)
        world = dist.group.WORLD
        if host_of_rank is None and isinstance(world, SparkdlProcessGroup):
            host_of_rank = world.communicator.topology.host_of_rank
        hosts = number_hosts(host_of_rank or [0] * dist.get_world_size())
        ranks = place_replicas(sizes, hosts) if by_replica else place_ranks(sizes, hosts)
        for name in _INSIDE_A_HOST:
            dim = DIMENSIONS.index(name)
            groups = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
            crossing = sum(len({hosts[rank] for rank in group}) > 1 for group in groups)
            if crossing and dist.get_rank() == 0:
                logger.warning(
                    "Parallelism: %d of the groups of %s %d lie on several hosts, which makes them slow. Hosts have %s "
                    "ranks, which tensor x context x shard should divide as far as they go.",
                    crossing,
                    name,
                    getattr(sizes, name),
                    sorted({hosts.count(host) for host in hosts}),
                )
        return RankLayout(sizes, DeviceMesh(device_type, ranks.flatten(), mesh_dim_names=("world",)))


def place_ranks(sizes: Parallelism, hosts: Sequence[int]) -> torch.Tensor:
    """Assign ranks to the places of a mesh so that its innermost dimensions lie inside hosts.

    Args:
        sizes: resolved sizes; their product is the number of ranks.
        hosts: index of the host of each rank.

    Returns:
        Ranks, ``int64`` of shape ``(pipeline, data, shard, context, tensor)``.
    """
    by_host = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    return torch.tensor(by_host, device="cpu").view([getattr(sizes, name) for name in DIMENSIONS])


def place_replicas(sizes: Parallelism, hosts: Sequence[int]) -> torch.Tensor:
    """Assign ranks to the places of a mesh as :func:`place_ranks` does, but apart for each replica.

    Each replica has ranks that follow each other. Their places in it depend only on the hosts of its own ranks.
    """
    length, one = len(hosts) // (sizes.data or 1), replace(sizes, data=1)
    starts = range(0, len(hosts), length)
    replicas = [place_ranks(one, number_hosts(hosts[start : start + length])) + start for start in starts]
    return torch.cat(replicas, dim=DIMENSIONS.index("data"))


def _what_fits(product: int, world_size: int, open_name: str | None) -> str:
    if open_name is None and world_size % product == 0:
        return f"Multiply a size by {world_size // product}, or leave data out: it takes what remains."
    lower = max(number for number in range(1, product + 1) if world_size % number == 0)
    multiples = [product * number for number in (world_size // product, world_size // product + 1) if number]
    start = f"start {' or '.join(map(str, multiples))} ranks"
    if lower == 1:
        return f"The number of ranks must be a multiple of {product}: {start}."
    return f"Choose sizes whose product divides {world_size}, such as {lower}, or {start}."


class RankLayout:
    """The ranks of a job in a mesh of the kinds of parallelism.

    Attributes:
        sizes: resolved sizes of all dimensions.
        mesh: device mesh of the ranks, ``(pipeline, data, shard, context, tensor)``; ``mesh["tensor"]`` is the mesh of
            only that dimension.
        sharding_mesh: the same mesh with the ranks of shard and context in one dimension, ``"shard"``.
    """

    def __init__(self, sizes: Parallelism, world: DeviceMesh) -> None:
        self.sizes = sizes
        lengths = [getattr(sizes, name) for name in DIMENSIONS]
        self.mesh = world._unflatten(0, tuple(lengths), DIMENSIONS)
        pipeline, data, shard, context, tensor = lengths
        # FSDP needs a view of the same mesh that has the sharding ranks in one or two dimensions.
        self.sharding_mesh = (
            self.mesh
            if context == 1
            else world._unflatten(
                0, (pipeline, data, shard * context, tensor), ("pipeline", "data", "shard", "tensor")
            )
        )
        self._joined: dict[tuple[str, ...], DeviceMesh] = {}

    def size(self, *names: str) -> int:
        """Number of ranks in a group along one or several dimensions."""
        return math.prod(self.mesh[name].size() for name in _check_names(names))

    def rank(self, *names: str) -> int:
        """This rank's number in its group along one or several dimensions."""
        number = 0
        for name in _check_names(names):
            number = number * self.mesh[name].size() + self.mesh.get_local_rank(name)
        return number

    def group(self, *names: str) -> dist.ProcessGroup:
        """Process group of this rank and its neighbors along one or several dimensions.

        Collective at the first call with several names.
        """
        names = _check_names(names)
        if len(names) == 1:
            return self.mesh[names[0]].get_group()
        if names not in self._joined:
            self._joined[names] = self.mesh[names]._flatten("_".join(names))
        return self._joined[names].get_group()

    def ranks(self, *names: str) -> list[int]:
        """Global ranks of the group along one or several dimensions, including this rank."""
        return dist.get_process_group_ranks(self.group(*names))

    def communicator(self, *names: str) -> Communicator:
        """Communicator of the group along one or several dimensions, a process set of the world's communicator.

        Raises:
            ParamError: if the process group has a backend of torch, which has no communicator.
        """
        group = self.group(*names)
        if not isinstance(group, SparkdlProcessGroup):
            raise ParamError(
                f"The process group of {' x '.join(names)} has the backend {dist.get_backend(group)!r}, which has no "
                "communicator. Initialize torch.distributed with the backend 'sparkdl'."
            )
        return group.communicator

    @property
    def row_reader(self) -> tuple[int, int]:
        """Index of this rank's share of the rows, and the number of shares.

        Ranks along the dimensions other than data and shard work on the same rows.
        """
        return self.rank("data", "shard"), self.size("data", "shard")

    def __repr__(self) -> str:
        return f"RankLayout({' x '.join(f'{name} {self.mesh[name].size()}' for name in DIMENSIONS)})"


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or not names:
        named = f"There is no dimension {' or '.join(map(repr, unknown))}"
        wrong = named if unknown else "No dimension was named"
        raise ParamError(f"{wrong}; the dimensions are {', '.join(DIMENSIONS)}.")
    return tuple(sorted(names, key=DIMENSIONS.index))
