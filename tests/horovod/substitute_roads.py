"""A road for CPU tensors over NCCL's stand-in, for machines without a GPU."""

from __future__ import annotations

import os

import torch

from sparkdl.collective import Communicator
from sparkdl.collective.nccl.opening import open_nccl_group
from sparkdl.horovod.torch.operations import device_road
from sparkdl.horovod.torch.operations.device_road import DeviceRoad, Roads
from sparkdl.torch.gpu.nccl import NcclAccelerator
from tests.run_ranks import RankEnvironment
from tests.torch.scenes.host_lane import HostLane


class SubstituteRoads(Roads):
    """Roads for CPU tensors, as if they were on a GPU."""

    is_used = True

    def serves(self, tensor: torch.Tensor) -> bool:
        return self.is_used and tensor.device.type == "cpu"

    def open(self, communicator: Communicator, device: torch.device) -> DeviceRoad:
        lane, timeout_s = HostLane(), communicator.timeout_s
        group = open_nccl_group(communicator, gpu=0, timeout_s=timeout_s)
        return DeviceRoad(NcclAccelerator(group, lane, timeout_s=timeout_s), lane, communicator)


def take_stand_in(environment: RankEnvironment) -> None:
    """Give this rank a GPU of the stand-in, and let its CPU tensors take the road."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(environment.rank)
    device_road.roads = SubstituteRoads()
