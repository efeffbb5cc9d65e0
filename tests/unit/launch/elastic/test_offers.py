"""Slots that others offer: what is sent to them, and whom the driver refuses."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from sparkdl.collective import Coordinator, RendezvousClient, new_secret
from sparkdl.errors import LaunchError, ParamError
from sparkdl.launch.elastic import offers as module
from sparkdl.launch.elastic.coordinating_task import run_members_from_task
from sparkdl.launch.elastic.offers import PREFIX, Invitation, OfferedSlots, SlotOffer
from sparkdl.launch.elastic.roster import ElasticLimits
from sparkdl.launch.hangs.watch import hang_limits
from sparkdl.launch.local_launch import offer_local_slots
from sparkdl.launch.wire.channel import DriverChannel
from sparkdl.launch.wire.messages import pickle_call
from sparkdl.launch.wire.spec import LaunchSpec, installed_versions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = new_secret()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator(secret=SECRET, world_size=4, host="127.0.0.1") as coordinator:
        yield coordinator


@pytest.fixture
def slots(coordinator: Coordinator) -> Iterator[OfferedSlots]:
    with RendezvousClient.connect(coordinator.address, SECRET, timeout_s=10.0) as client:
        yield OfferedSlots(client.view(PREFIX), first=2, versions=installed_versions())


def make_offer(coordinator: Coordinator, secret: bytes = SECRET) -> SlotOffer:
    invitation = Invitation(coordinator=coordinator.address, secret=secret)
    return offer_local_slots(invitation, num_ranks=2, max_restarts=0)


def spec_of_launch() -> LaunchSpec:
    return LaunchSpec(
        num_ranks=1,
        payload=pickle_call(len, (), {}),
        transport="auto",
        wire="float32",
        num_threads=1,
        environment=(("TOKEN", "of the driver"),),
        start_timeout_s=1.0,
        limits=hang_limits(None, 1.0),
    )


def test_neither_the_secret_nor_the_drivers_variables_are_sent_to_another_machine(
    coordinator: Coordinator, slots: OfferedSlots
) -> None:
    spec = spec_of_launch()
    with (
        RendezvousClient.connect(coordinator.address, SECRET, timeout_s=10.0) as client,
        DriverChannel(SECRET, 1, host="127.0.0.1") as channel,
    ):
        offer = module._OfferMessage(kind="offer", num_slots=2, versions=installed_versions())
        client.view(PREFIX).post("offers", offer.to_json())
        slots.poll()
        assert set(slots.offer_of) == {2, 3}
        slots.start(2, spec, channel)
        sent = client.view(PREFIX).get("starts/1/1", 10.0)
    assert spec.secret not in sent
    assert b"of the driver" not in sent
    assert pickle.loads(sent)[1].payload == spec.payload


def test_no_member_is_started_in_an_offer_that_ended_with_its_member(
    coordinator: Coordinator, slots: OfferedSlots
) -> None:
    spec = spec_of_launch()
    with (
        RendezvousClient.connect(coordinator.address, SECRET, timeout_s=10.0) as client,
        DriverChannel(SECRET, 1, host="127.0.0.1") as channel,
    ):
        for number, ends_with_members in ((1, True), (2, False)):
            offer = module._OfferMessage(
                kind="offer", num_slots=1, ends_with_members=ends_with_members, versions=installed_versions()
            )
            client.view(PREFIX).post("offers", offer.to_json())
            slots.poll()
            slots.start(max(slots.offer_of), replace(spec, member=number), channel)
        for member in (1, 2):
            client.view(PREFIX).post("offers", module._OfferMessage(kind="ended", member=member).to_json())
        slots.poll()
    assert list(slots.offer_of.values()) == [2]


def test_slots_are_withdrawn_when_their_process_ends(coordinator: Coordinator, slots: OfferedSlots) -> None:
    offer = make_offer(coordinator)
    thread = threading.Thread(target=offer.run)
    thread.start()
    while not slots.offer_of:
        slots.poll()
    offer.leave()
    while slots.offer_of:
        slots.poll()
    thread.join()


def test_an_offer_with_other_versions_or_another_secret_is_refused(
    coordinator: Coordinator, slots: OfferedSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="another secret"):
        make_offer(coordinator, new_secret()).run()
    monkeypatch.setattr(module, "installed_versions", lambda: {**installed_versions(), "sparkdl": "0.0"})
    errors: list[BaseException] = []

    def run() -> None:
        try:
            make_offer(coordinator).run()
        except LaunchError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        slots.poll()
    assert "sparkdl is 0.1.0 on the driver and 0.0 on the executor. Install the same here." in str(errors[0])
    assert slots.offer_of == {}


def test_an_invitation_is_read_as_it_was_written_and_never_over_another_file(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    invitation = Invitation(coordinator=coordinator.address, secret=SECRET)
    invitation.write(tmp_path / "join")
    assert os.stat(tmp_path / "join").st_mode & 0o777 == 0o600
    assert Invitation.read(tmp_path / "join") == invitation
    assert SECRET.hex() not in repr(invitation)
    with pytest.raises(FileExistsError):
        invitation.write(tmp_path / "join")


def test_replicas_of_several_ranks_are_refused_where_executors_cannot_reach_the_driver() -> None:
    limits = ElasticLimits(least=2, most=4, max_restarts=1, group_size=2)
    with pytest.raises(ParamError, match="2 ranks share a model.*Set SPARKDL_LISTEN"):
        run_members_from_task(
            cast("SparkSession", None),
            spec_of_launch(),
            limits,
            resources=None,
            on_log=None,
            on_event=None,
            leases=None,
        )
