"""The bridges between c10d stores and the rendezvous, and process groups that torch opens by itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparkdl.torch
from sparkdl.collective import Coordinator, RendezvousClient, new_secret
from sparkdl.errors import CommunicatorTimeoutError
from sparkdl.torch import RendezvousStore, StoreRendezvous
from tests.run_ranks import RankEnvironment, run_ranks


@pytest.fixture
def rendezvous() -> Iterator[RendezvousClient]:
    secret = new_secret()
    with (
        Coordinator(secret=secret, world_size=1) as coordinator,
        RendezvousClient.connect(coordinator.address, secret, 10.0) as client,
    ):
        yield client


def test_store_of_a_rendezvous_passes_torchs_own_test(rendezvous: RendezvousClient) -> None:
    store = RendezvousStore(rendezvous, timeout_s=5.0)
    dist._test_python_store(store)


def test_store_of_a_rendezvous_serves_prefix_stores(rendezvous: RendezvousClient) -> None:
    base = RendezvousStore(rendezvous, timeout_s=5.0)
    store = dist.PrefixStore("a", base)
    store.set("text", "väl")
    assert store.get("text") == "väl".encode()
    assert store.add("count", 2) == 2
    assert store.add("count", 3) == 5
    assert store.check(["text", "count"])
    assert not store.check(["missing"])
    assert store.compare_set("text", "väl", "new") == b"new"
    assert store.num_keys() == 2
    assert store.delete_key("text")
    assert not store.delete_key("text")
    store.wait(["count"], timedelta(seconds=1))


def test_missing_key_is_named_when_its_time_is_up(rendezvous: RendezvousClient) -> None:
    store = RendezvousStore(rendezvous, timeout_s=5.0)
    with pytest.raises(CommunicatorTimeoutError, match="missing"):
        store.wait(["missing"], timedelta(seconds=0.05))
    with pytest.raises(CommunicatorTimeoutError, match="missing"):
        StoreRendezvous(dist.HashStore()).view("x").get("missing", 0.05)


def test_rendezvous_over_a_c10d_store_keeps_bytes() -> None:
    rendezvous = StoreRendezvous(dist.HashStore()).view("x")
    rendezvous.set("key", b"\x00\xff")
    assert rendezvous.get("key", 1.0) == b"\x00\xff"
    assert rendezvous.add("count", 4) == 4
    assert rendezvous.get("count", 1.0) == b"4"
    assert rendezvous.compare_set("key", b"\x00\xff", b"new") == b"new"
    assert rendezvous.check(["key"])
    assert rendezvous.delete("key")
    assert not rendezvous.check(["key"])


def _join_through_a_file(environment: RankEnvironment, path: str) -> list[float]:
    assert sparkdl.torch.BACKEND_NAME in dist.Backend.backend_list
    dist.init_process_group(
        "sparkdl",
        init_method=f"file://{path}",
        rank=environment.rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    tensor = torch.tensor([float(environment.rank + 1)])
    dist.all_reduce(tensor)
    alone = dist.new_group([environment.rank], use_local_synchronization=True)
    both = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=alone)
    dist.all_reduce(tensor, group=both)
    dist.destroy_process_group()
    return tensor.tolist()


def test_torch_can_bring_up_the_backend_by_itself(tmp_path: Path) -> None:
    assert run_ranks(2, _join_through_a_file, str(tmp_path / "store")) == [[6.0], [6.0]]
