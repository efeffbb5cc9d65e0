"""The layout of a model on the ranks that run: they measure their cluster, and rank 0 chooses for all of them.

:class:`RankPlanner` is what ``parallelism="auto"`` of an estimator sends to the ranks; scripts call
:func:`choose_layout`. Runs on the *rank*, with torch.distributed initialized.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sparkdl.collective.current import provided
from sparkdl.cores import usable_cores
from sparkdl.errors import ParamError
from sparkdl.host_memory import available_bytes
from sparkdl.parallel import Parallelism
from sparkdl.parallel.parallelism import DIMENSIONS
from sparkdl.parallel.parallelize import check_parts
from sparkdl.planner.cluster import LINKS, Cluster, Device, Link, known_gpu, link_of_sums, make_cluster
from sparkdl.planner.counting import count, shape_of_module
from sparkdl.planner.layouts import Freedom, Layout, Plan, plan
from sparkdl.planner.shape import RECIPES, ModelShape, TrainingRecipe
from sparkdl.planner.sums import time_sums

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

CLEARLY = 0.1
"""Share of the time of replicas that another layout must gain to be chosen. Rates that are measured within a second
differ by some percent from one fit to the next."""

_SIDE = 512
"""Rows, columns and depth of the product that gives a device's rate."""

_ELEMENTS = 4 << 20
"""Elements of the vector whose sum with a number gives the rate of memory."""

_REPETITIONS = 5


@dataclass(frozen=True, kw_only=True)
class RankPlanner:
    """Chooses the layout of a fit on its ranks. Made on the *driver*.

    Attributes:
        shape: shape of the model.
        recipe: how numbers are held.
        batch_size: number of rows of a forward pass for each rank; in every layout all ranks together have as many.
        passes: number of forward passes of an update.
        dimensions: kinds of parallelism that the program supports.
    """

    shape: ModelShape
    recipe: TrainingRecipe
    batch_size: int
    passes: int = 1
    dimensions: Collection[str] = DIMENSIONS

    def choose(self, module: nn.Module, device: torch.device) -> tuple[Parallelism, Mapping[str, str]]:
        """Return the layout, and its ``code`` and ``reason``, the same on all ranks. Collective.

        Raises:
            ParamError: if the model fits in no layout; the message names the smallest cluster that would do.
        """
        cluster = cluster_of_ranks(device, self.recipe)
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                layout, why = best_layout(self._plan(module, cluster))
                answer = [
                    (layout.parallelism, {"code": layout.as_code(), "reason": f"{why} {layout.reason}"})
                ]
                logger.info("On %s: %s. %s", cluster, *answer[0][1].values())
            except ParamError as error:
                answer = [str(error)]
        dist.broadcast_object_list(answer, 0)
        if isinstance(answer[0], str):
            raise ParamError(answer[0])
        chosen: tuple[Parallelism, Mapping[str, str]] = answer[0]
        return chosen

    def _plan(self, module: nn.Module, cluster: Cluster) -> Plan:
        def suits(sizes: Parallelism) -> bool:
            rows = self.batch_size * sizes.tensor * sizes.context * sizes.pipeline
            try:
                check_parts(module, sizes, rows)
            except ParamError:
                return False
            return True

        return plan(
            self.shape,
            cluster,
            batch=self.batch_size * self.passes * cluster.world_size,
            recipe=self.recipe,
            freedom=Freedom(dimensions=frozenset(self.dimensions), passes=self.passes, suits=suits),
        )


def make_planner(
    module: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    batch_size: int,
    passes: int = 1,
    precision: str = "float32",
    optimizer_bytes: int | None = None,
    dimensions: Collection[str] = DIMENSIONS,
) -> RankPlanner:
    """Return the planner of a module: a decoder, or any other module, which is counted.

    Args:
        module: the module.
        inputs: arguments of its ``forward``, by position or by name, tensors of the same number of rows.
        batch_size: number of rows of a forward pass for each rank.
        passes: number of forward passes of an update.
        precision: as an estimator's Param ``precision``.
        optimizer_bytes: bytes of the optimizer's state of the whole module; that of AdamW if None.
        dimensions: kinds of parallelism that the program supports; a module with frozen weights is only replicated and
            sharded.

    Raises:
        ParamError: if the module cannot be counted.
    """
    recipe = RECIPES["float32" if precision == "float32" else "bfloat16"]
    tensors = inputs.values() if isinstance(inputs, Mapping) else inputs
    first = next((value for value in tensors if isinstance(value, torch.Tensor)), None)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    shape: ModelShape | None = None
    if trained == num_parameters and first is not None and first.ndim == 2 and not first.is_floating_point():
        try:
            shape = shape_of_module(module, sequence=first.shape[1])
        except ParamError:  # no decoder whose sizes the planner can read
            shape = None
    recipe = replace(
        recipe,
        gradient_bytes=recipe.gradient_bytes * trained / num_parameters if num_parameters else 0,
        optimizer_bytes=(
            recipe.optimizer_bytes * trained / num_parameters
            if optimizer_bytes is None
            else optimizer_bytes / num_parameters
        ),
    )
    return RankPlanner(
        shape=count(module, inputs) if shape is None else shape,
        recipe=recipe,
        batch_size=batch_size,
        passes=passes,
        dimensions=dimensions
        if trained == num_parameters
        else [name for name in dimensions if name in ("data", "shard")],
    )


def choose_layout(
    module: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    batch_size: int,
    passes: int = 1,
    precision: str = "float32",
    device: torch.device | str = "cpu",
    dimensions: Collection[str] = DIMENSIONS,
) -> Parallelism:
    """Return the layout of a module on the ranks of torch.distributed, the same on all of them. Collective.

    Rank 0 logs which one, and why. In ranks of a Runner, the driver writes both to the MLflow run that is active where
    :meth:`sparkdl.Runner.run` is called. Arguments are those of :func:`make_planner`, and the ranks' device.

    Raises:
        ParamError: if the module cannot be counted, or fits in no layout.
    """
    planner = make_planner(
        module, inputs, batch_size=batch_size, passes=passes, precision=precision, dimensions=dimensions
    )
    parallelism, about = planner.choose(module, torch.device(device))
    if dist.get_rank() == 0:
        logger.warning("The planner chooses %s. %s", about["code"], about["reason"])
        provided.report({"kind": "layout", **about})
    return parallelism


def best_layout(found: Plan) -> tuple[Layout, str]:
    """Return the layout to take, and why: replicas, unless they do not fit, or another layout is clearly faster."""
    best = found.best
    world = found.cluster.world_size
    if world == 1:
        return best, "There is one rank."
    plain = next((layout for layout in found.layouts if layout.parallelism.data == world), None)
    if plain is None:
        return best, "Replicas do not fit."
    gain = 1 - best.time.total / plain.time.total
    if gain < CLEARLY:
        return plain, "Replicas fit, and no other layout is clearly faster."
    return best, f"A step takes {gain:.0%} less time than with replicas."


def cluster_of_ranks(device: torch.device, recipe: TrainingRecipe) -> Cluster:
    """Return the cluster that the ranks of torch.distributed run on; links are measured. Collective.

    A GPU whose figures the planner has counts with those; other devices are measured. If hosts have different numbers
    of ranks, they count as more hosts, with as many ranks each as divides all numbers.
    """
    from sparkdl.torch import SparkdlProcessGroup

    world, number = dist.group.WORLD, dist.get_world_size()
    hosts = [0] * number
    if isinstance(world, SparkdlProcessGroup):
        hosts = list(world.communicator.topology.host_of_rank)
    on_host = [hosts.count(host) for host in set(hosts)]
    per_host = math.gcd(*on_host)
    layout = Parallelism(data=number // per_host, tensor=per_host).lay_out(device_type=device.type)
    rank_device = _device(device, recipe, ranks_here=hosts.count(hosts[dist.get_rank()]))
    inside: Link | None = None
    between = LINKS["memory"]
    if per_host > 1:
        inside = _link(layout.group("tensor"), per_host, device, "link inside of hosts")
    if number > per_host:
        between = _link(layout.group("data"), number // per_host, device, "link between hosts")
    return make_cluster(
        rank_device, hosts=number // per_host, devices_per_host=per_host, inside=inside, between=between
    )


def _link(group: dist.ProcessGroup, ranks: int, device: torch.device, name: str) -> Link:
    return link_of_sums(time_sums(group, device), ranks, name=name, is_cpu=device.type == "cpu")


def _device(device: torch.device, recipe: TrainingRecipe, *, ranks_here: int) -> Device:
    is_cpu = device.type == "cpu"
    if is_cpu:
        memory = (available_bytes() or 0) / ranks_here
    else:
        identity = str(torch.cuda.get_device_properties(device).uuid)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, identity)
        memory = torch.cuda.mem_get_info(device)[0] / of_ranks.count(identity)  # ranks may share a GPU
    known = (
        None if is_cpu else known_gpu(torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1])
    )
    figures = torch.tensor([memory, *_rates(device, recipe)], dtype=torch.float64)
    figures = figures.to(device)
    dist.all_reduce(figures, op=dist.ReduceOp.MIN)
    memory, rate, bandwidth = figures.tolist()
    if known is not None:
        return replace(known, memory_bytes=memory)
    return Device(
        name="cpu" if is_cpu else torch.cuda.get_device_name(device),
        peak=rate,
        float32_peak=rate,
        rate=rate,
        float32_rate=rate,
        memory_bytes=memory,
        bandwidth=bandwidth,
        moved_rate=bandwidth,
        attention_rate=rate / 2,
        is_cpu=is_cpu,
        shared_by=max(1.0, ranks_here / usable_cores()) if is_cpu else 1.0,
    )


def _rates(device: torch.device, recipe: TrainingRecipe) -> tuple[float, float]:
    """Operations per second of a product, and bytes per second of a sum of vectors, while all ranks compute."""
    dtype = torch.bfloat16 if recipe.compute_bytes == 2 else torch.float32
    square = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    vector = torch.ones(_ELEMENTS, device=device)
    dist.barrier()
    product_s = _median_s(lambda: square @ square, device)
    sum_s = _median_s(lambda: vector.add_(1.0), device)
    return 2 * _SIDE**3 / product_s, 2 * vector.nbytes / sum_s


def _median_s(operation: Callable[[], object], device: torch.device) -> float:
    operation()
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
