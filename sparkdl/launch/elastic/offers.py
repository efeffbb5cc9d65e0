"""Slots that other processes offer to an elastic launch: the members in them join and leave by hand.

A process on any machine that has the *invitation* of a launch, its coordinator's address and its secret, offers slots.
The driver starts members in them as in slots of its own; only their tasks run over there, as threads of the offering
process. Both ends are here: :class:`OfferedSlots` runs on the *driver*, :class:`SlotOffer` in the offering process.
They exchange, besides the keys of a member (see :mod:`sparkdl.launch.elastic`)::

    offer   post("offers", _OfferMessage)       it offers slots; a member in one has ended; it leaves; it is gone
    driver  set("answers of offers/<n>", text)  why the offer is refused; empty if it is taken
    driver  post("starts/<n>", spec, slot)      start this member; without a content: the run is over
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sparkdl.collective import Deadline, RendezvousClient
from sparkdl.errors import (
    CommunicatorError,
    CommunicatorTimeoutError,
    ExecutorsLostError,
    LaunchError,
    ParamError,
)
from sparkdl.launch.stage import Stage
from sparkdl.launch.wire.spec import installed_versions, version_conflicts
from sparkdl.launch.wire.world import JsonMessage
from sparkdl.rendezvous.addresses import Address

if TYPE_CHECKING:
    from sparkdl.launch.ranks import MakeStage
    from sparkdl.launch.wire.channel import DriverChannel
    from sparkdl.launch.wire.spec import LaunchSpec
    from sparkdl.rendezvous.store import Rendezvous

logger = logging.getLogger(__name__)

PREFIX = "members"
"""The part of the rendezvous in which members, offers and driver meet."""

CONNECT_TIMEOUT_S = 60.0
_OFFERS, _ANSWERS, _STARTS = "offers", "answers of offers", "starts"
_POLL_S = 0.25
LEAVE_TIMEOUT_S = 60.0
"""How long ranks that are to leave may take to finish their step; those of a program without a state never do."""

_END_TIMEOUT_S = 20.0
"""How long the tasks of an offer may take to end when the run is over."""


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a process needs to offer slots to a launch.

    Attributes:
        coordinator: address of the coordinator of the launch.
        secret: the launch's secret.
    """

    coordinator: Address
    secret: bytes = field(repr=False)

    def write(self, path: Path) -> None:
        """Write it to a new file that only this user can read."""
        fields = {"coordinator": self.coordinator.to_bytes().decode(), "secret": self.secret.hex()}
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(fields, file)

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Read what :meth:`write` wrote.

        Raises:
            ParamError: if there is no such file, others can read it, or it is something else.
        """
        try:
            mode, text = path.stat().st_mode, path.read_text()
        except OSError as error:
            raise ParamError(
                f"{path} cannot be read: {error.strerror}. Give the file whose name the run has printed; it exists "
                "until the run ends."
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ParamError(
                f"{path} holds a secret, and other users can read it. Run `chmod 600 {path}`; if you do not trust all "
                "of them, start the run again, which makes a new secret."
            )
        try:
            fields = json.loads(text)
            return cls(
                coordinator=Address.from_bytes(fields["coordinator"]), secret=bytes.fromhex(fields["secret"])
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ParamError(f"{path} is not a file that `sparkdl run` has written: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class _OfferMessage(JsonMessage):
    """What an offering process says.

    Attributes:
        kind: ``offer``, ``ended`` (the member in a slot), ``leaving``, or ``gone`` (the process).
        offer: number of the offer.
        num_slots: number of slots that are offered.
        label: placeholder for the value of a rank in these slots; the value does not leave the offering process.
        ends_with_members: whether the offer ends when a member in it has ended.
        versions: versions there.
        member: the member that has ended.
        error: why its task could not run; empty otherwise.
    """

    kind: str
    offer: int = 0
    num_slots: int = 0
    label: str | None = None
    ends_with_members: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    member: int = -1
    error: str = ""


class OfferedSlots:
    """The slots that other processes offer to a launch.

    Args:
        rendezvous: rendezvous of the launch.
        first: number of the first of these slots.
        versions: versions on the driver.

    Attributes:
        offer_of: the number of the offer of each slot in which members may be started.
    """

    def __init__(self, rendezvous: Rendezvous, *, first: int, versions: Mapping[str, str]) -> None:
        self._rendezvous, self._versions = rendezvous, versions
        self._slots = count(first)
        self._next = 1
        self._stages: dict[int, tuple[int, _OfferedStage]] = {}
        """Offer and stage of each member that was started in a slot and has not ended."""
        self._offers: dict[int, _OfferMessage] = {}
        self.offer_of: dict[int, int] = {}

    def poll(self) -> None:
        """Take in new offers, and the later messages of offering processes."""
        while self._rendezvous.check([key := f"{_OFFERS}/{self._next}"]):
            message = _OfferMessage.from_json(self._rendezvous.get(key, CONNECT_TIMEOUT_S))
            self._rendezvous.delete(key)
            number, self._next = self._next, self._next + 1
            if message.kind == "offer":
                self._take(number, message)
            elif message.kind == "ended":
                self._end(message.member, message.error)
            elif message.kind == "leaving":
                self._withdraw(message.offer)
                for offer, stage in self._stages.values():
                    stage.is_to_leave |= offer == message.offer
            else:
                self._withdraw(message.offer)
                for member, (offer, _) in list(self._stages.items()):
                    if offer == message.offer:
                        self._end(member, "the process that offered its slot has ended")

    def start(self, slot: int, spec: LaunchSpec, channel: DriverChannel) -> Stage:
        """Start a member in a slot."""
        offer = self.offer_of[slot]
        stage = _OfferedStage(channel, self._offers[offer].label)
        self._stages[spec.member] = offer, stage
        # Connections are not encrypted: the other end has the secret, and needs nothing of the driver's environment.
        public = replace(spec, environment=(), secret=b"")
        self._rendezvous.post(f"{_STARTS}/{offer}", pickle.dumps((slot, public)))
        return stage

    def end(self) -> None:
        """Tell all offering processes that the run is over."""
        for offer in set(self.offer_of.values()):
            self._rendezvous.post(f"{_STARTS}/{offer}", b"")

    def _take(self, number: int, message: _OfferMessage) -> None:
        conflicts = version_conflicts(self._versions, message.versions)
        self._rendezvous.set(f"{_ANSWERS}/{number}", "; ".join(conflicts).encode())
        if not conflicts:
            self._offers[number] = message
            for slot, _ in zip(self._slots, range(message.num_slots), strict=False):
                self.offer_of[slot] = number

    def _withdraw(self, offer: int) -> None:
        self.offer_of = {slot: other for slot, other in self.offer_of.items() if other != offer}

    def _end(self, member: int, error: str) -> None:
        if member in self._stages:
            offer, stage = self._stages.pop(member)
            stage.end(error)
            if self._offers[offer].ends_with_members:
                self._withdraw(offer)


class _OfferedStage(Stage):
    """The task of a member in an offered slot.

    Args:
        channel: channel to the task.
        label: placeholder that is returned in place of the rank's value.

    Attributes:
        is_to_leave: whether the process that offers the slot is to go.
    """

    is_to_leave = False
    error: Exception | None = None

    def __init__(self, channel: DriverChannel, label: str | None) -> None:
        self.num_ranks, self.spark, self._label = 1, None, label
        self._channel, self._is_over = channel, False

    def end(self, error: str) -> None:
        if error:
            self.error = ExecutorsLostError(f"A rank in an offered slot was lost: {error}.")
        self._is_over = True

    @property
    def running(self) -> bool:
        # What the task has said comes by another connection.
        return not (self._is_over and self._channel.wait_until_disconnected(0.0))

    def cancel(self, *, timeout_s: float) -> None:
        """Wait for the task, which the channel has cancelled."""
        self._is_over |= self._channel.wait_until_disconnected(timeout_s)

    def outcomes(self) -> list[tuple[int, str, int]]:
        return [] if self._channel.failures else [(0, "result", 1)]

    def fetch(self, rank: int, kind: str, num_chunks: int, into: IO[bytes]) -> None:  # noqa: ARG002 - for Spark
        into.write(pickle.dumps(self._label))

    def close(self) -> None:
        """Do nothing: there is only a label."""


class SlotOffer:
    """Offers slots of this process to a launch, and runs the tasks of the members that its driver starts in them.

    Args:
        invitation: invitation of the launch.
        make_stage: function that starts the task of a member by its spec, in one of the slots.
        num_slots: number of slots.
        max_restarts: how many members are started in place of those that have ended.
        ends_with_members: whether the offer ends when a member in it has ended.
        label: placeholder for the values of the ranks here, which the process that began the launch gets.
    """

    def __init__(
        self,
        invitation: Invitation,
        make_stage: MakeStage,
        *,
        num_slots: int,
        max_restarts: int,
        ends_with_members: bool = False,
        label: str | None = None,
    ) -> None:
        self._invitation, self._make_stage, self._label = invitation, make_stage, label
        self._ends_with_members = ends_with_members
        self._num_slots, self._starts_left = num_slots, num_slots + max_restarts
        self._stages: dict[int, Stage] = {}
        self._is_leaving = False

    def leave(self) -> None:
        """Leave the run after the current step of its ranks. May be called from a signal handler."""
        self._is_leaving = True

    def run(self) -> None:
        """Run the tasks until the run is over, or until this process was to leave and its ranks have ended.

        Raises:
            LaunchError: if the launch cannot be reached, has other versions, or too many ranks have ended here.
        """
        address = self._invitation.coordinator
        try:
            client = RendezvousClient.connect(address, self._invitation.secret, timeout_s=CONNECT_TIMEOUT_S)
        except OSError as error:
            raise LaunchError(
                f"The run at {address} cannot be reached: {error}. It may have ended. If it runs on another "
                "machine, SPARKDL_LISTEN there has to name an address, network or interface that this machine reaches."
            ) from error
        with client:
            try:
                self._serve(client.view(PREFIX))
            except CommunicatorTimeoutError as error:
                raise LaunchError(
                    f"The run at {address} has not answered within {CONNECT_TIMEOUT_S:g} s: {error}. Look "
                    "whether it is stopped."
                ) from error
            except CommunicatorError:
                pass  # the run has ended
            deadline = Deadline(0.0 if self._is_leaving else _END_TIMEOUT_S)
            while any(stage.running for stage in self._stages.values()) and not deadline.expired:
                time.sleep(_POLL_S)

    def _serve(self, rendezvous: Rendezvous) -> None:
        message = _OfferMessage(
            kind="offer",
            num_slots=self._num_slots,
            label=self._label,
            ends_with_members=self._ends_with_members,
            versions=installed_versions(),
        )
        offer = rendezvous.post(_OFFERS, message.to_json())
        rendezvous.post_if_lost(_OFFERS, _OfferMessage(kind="gone", offer=offer).to_json())
        if refusal := rendezvous.get(f"{_ANSWERS}/{offer}", CONNECT_TIMEOUT_S).decode():
            raise LaunchError(
                f"This machine has other versions than the run: {refusal}. Install the same here."
            )
        leave_by: Deadline | None = None
        for number in count(1):
            while (start := _take_start(rendezvous, f"{_STARTS}/{offer}/{number}")) is None:
                self._report_ended(rendezvous)
                if self._is_leaving and leave_by is None:
                    rendezvous.post(_OFFERS, _OfferMessage(kind="leaving", offer=offer).to_json())
                    leave_by = Deadline(LEAVE_TIMEOUT_S)
                if leave_by is not None and (leave_by.expired or not self._stages):
                    return
            if not start:
                return
            self._start(*pickle.loads(start))  # noqa: S301 - of the driver, which has proved that it knows the secret

    def _start(self, slot: int, spec: LaunchSpec) -> None:
        if self._starts_left == 0:
            raise LaunchError(
                "Too many ranks have ended on this machine, which leaves the run. Look at what they have printed, or "
                "raise --max-restarts."
            )
        self._starts_left -= 1
        complete = replace(spec, secret=self._invitation.secret)
        self._stages[spec.member] = self._make_stage(complete, slot)

    def _report_ended(self, rendezvous: Rendezvous) -> None:
        for member, stage in list(self._stages.items()):
            if not stage.running:
                del self._stages[member]
                error = "" if stage.error is None else f"{type(stage.error).__name__}: {stage.error}"
                message = _OfferMessage(kind="ended", member=member, error=error)
                rendezvous.post(_OFFERS, message.to_json())
                self._is_leaving |= self._ends_with_members


def _take_start(rendezvous: Rendezvous, key: str) -> bytes | None:
    """The content of the next start; None if there is none yet."""
    try:
        content = rendezvous.get(key, _POLL_S)
    except CommunicatorTimeoutError:
        return None
    rendezvous.delete(key)
    return content
