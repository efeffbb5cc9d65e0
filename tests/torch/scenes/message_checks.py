"""Checks of sending and receiving in torch.distributed on the backend ``"sparkdl"``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.torch.scenes.rank_tensors import rank_and_size, tensor_of


def check_messages_are_matched_by_sender_and_tag() -> None:
    rank, size = rank_and_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        works = [dist.isend(tensor_of(rank + 10 * tag, dtype), following, tag=tag) for tag in (1, 2)]
        received = {tag: torch.zeros(3, 5, dtype=dtype).t() for tag in (2, 1)}
        for tag, tensor in received.items():
            assert dist.recv(tensor, previous, tag=tag) == previous
            torch.testing.assert_close(tensor, tensor_of(previous + 10 * tag, dtype), msg=f"{dtype} {tag}")
        for work in works:
            work.wait()


def check_messages_do_not_wait_for_collectives_nor_these_for_them() -> None:
    rank, size = rank_and_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    large = torch.full((1 << 20,), float(rank))
    sent, into = dist.isend(large, following), torch.empty(1 << 20)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    received = dist.irecv(into, previous)
    dist.barrier()
    received.wait()
    assert received.is_completed()
    sent.wait()
    assert (into == previous).all()
    both = [
        dist.P2POp(dist.isend, large, following),
        dist.P2POp(dist.irecv, into.zero_(), previous),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert (into == previous).all()


def check_messages_travel_in_subgroups_and_as_objects() -> None:
    rank, size = rank_and_size()
    reversed_group = dist.new_group(list(range(size))[::-1], backend="sparkdl")
    if rank == 0:
        dist.send(torch.tensor([7.0]), dst=size - 1, group=reversed_group)
        dist.send_object_list([{"from": rank}], dst=1)
    if rank == size - 1:
        tensor = torch.zeros(1)
        dist.recv(tensor, src=0, group=reversed_group)
        assert tensor.item() == 7.0
    if rank == 1:
        objects: list[object] = [None]
        dist.recv_object_list(objects, src=0)
        assert objects == [{"from": 0}]
    dist.destroy_process_group(reversed_group)


def check_messages_are_received_from_any_rank() -> None:
    rank, size = rank_and_size()
    if rank != 0:
        dist.send(torch.full((3,), float(rank)), dst=0, tag=9)
        return
    senders = []
    for _ in range(size - 1):
        tensor = torch.zeros(3)
        senders.append(dist.recv(tensor, tag=9))
        assert (tensor == senders[-1]).all()
    assert sorted(senders) == list(range(1, size))
