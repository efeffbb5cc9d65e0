"""Who forms the next world, from arrivals and losses in every order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from sparkdl.collective import Coordinator, RendezvousClient, new_secret
from sparkdl.launch.elastic import roster as module
from sparkdl.launch.elastic.roster import ElasticLimits, Roster
from sparkdl.launch.wire.world import (
    ANSWER_KEY,
    ARRIVALS,
    BROKEN_KEY,
    LEAVE_KEY,
    Answer,
    MemberArrival,
    World,
)


class Driver:
    """A roster, and members that say what members say."""

    def __init__(self, client: RendezvousClient, **limits: Any) -> None:
        self.client = client
        self.roster = Roster(
            client,
            wanted=2,
            limits=ElasticLimits(**{"least": 1, "most": 3, "max_restarts": 9, **limits}),
            leases=repeat("name"),
        )

    def arrive(self, member: int, **fields: Any) -> int:
        number = self.client.post(ARRIVALS, MemberArrival(member=member, **fields).to_json())
        self.roster.poll(0.0)
        return number

    def answer(self, number: int) -> Answer | None:
        key = ANSWER_KEY.format(number)
        return Answer.from_json(self.client.get(key, 1.0)) if self.client.check([key]) else None

    def world(self, number: int) -> World:
        answer = self.answer(number)
        assert answer is not None
        assert answer.world is not None
        return answer.world

    def begin(self, *members: int, **fields: Any) -> list[int]:
        return [self.arrive(member, **fields) for member in members]


@pytest.fixture
def client() -> Iterator[RendezvousClient]:
    secret = new_secret()
    with (
        Coordinator(secret=secret, world_size=4, host="127.0.0.1") as coordinator,
        RendezvousClient.connect(coordinator.address, secret, timeout_s=10.0) as client,
    ):
        yield client


def test_the_first_world_waits_for_the_wanted_members_and_briefly_for_fewer(client, monkeypatch, caplog):
    driver = Driver(client)
    first = driver.arrive(0)
    assert driver.answer(first) is None
    second = driver.arrive(1)
    assert driver.world(first) == driver.world(second) == World(number=1, members=(0, 1), lease="name")
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    alone = Driver(client.view("other"))
    assert alone.world(alone.arrive(7)).members == (7,)
    assert "The run begins with 1 of 2 ranks" in caplog.text


def test_survivors_wait_for_each_other_and_the_farthest_is_rank_0(client):
    driver = Driver(client)
    driver.begin(0, 1)
    third = driver.arrive(2)
    assert client.check([LEAVE_KEY.format(1)])  # asked to leave, as one waits to join
    first = driver.arrive(0, after=1, progress=4)
    assert driver.answer(first) is None
    second = driver.arrive(1, after=1, progress=5)
    expected = World(number=2, members=(1, 0, 2), progress=5, lease="name")
    assert [driver.world(number) for number in (first, second, third)] == [expected] * 3


def test_a_lost_member_is_not_waited_for_and_breaks_its_world(client):
    driver = Driver(client)
    driver.begin(0, 1)
    first = driver.arrive(0, after=1, progress=3)
    driver.client.post(ARRIVALS, MemberArrival(member=1, is_lost=True).to_json())
    driver.roster.poll(0.0)
    assert client.get(BROKEN_KEY.format(1), 0.0) == b"member 1 was lost"
    assert driver.world(first).members == (0,)
    late = driver.answer(driver.arrive(1, after=1, progress=3))  # it was only frozen
    assert late is not None
    assert "considered lost" in late.refusal


def test_members_in_place_of_all_begin_together(client, monkeypatch):
    driver = Driver(client)
    driver.begin(0, 1)
    driver.roster.lose(0)
    driver.roster.lose(1)
    first = driver.arrive(2)
    assert driver.answer(first) is None
    second = driver.arrive(3)
    assert driver.world(first).members == driver.world(second).members == (2, 3)
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    driver.roster.lose(2)
    driver.roster.lose(3)
    assert driver.world(driver.arrive(4)).members == (4,)


def test_a_member_that_is_released_leaves_after_its_step_and_breaks_nothing(client):
    driver = Driver(client)
    driver.begin(0, 1)
    driver.roster.let_go(1)
    driver.roster.poll(0.0)
    assert client.check([LEAVE_KEY.format(1)])
    first = driver.arrive(0, after=1, progress=3)
    assert driver.answer(first) is None
    assert driver.roster.released == set()
    leaving = driver.answer(driver.arrive(1, after=1, progress=3))
    assert leaving is not None
    assert "leave the run" in leaving.refusal
    assert driver.roster.released == {1}
    driver.client.post(ARRIVALS, MemberArrival(member=1, is_lost=True).to_json())
    driver.roster.poll(0.0)
    assert driver.world(first).members == (0,)
    assert client.get(BROKEN_KEY.format(1), 0.0) == b""


def test_members_that_are_done_are_released_or_continue_without_rank_0(client):
    driver = Driver(client)
    driver.begin(0, 1)
    done = driver.arrive(1, after=1, progress=9, is_done=True)
    assert driver.answer(done) is None
    driver.roster.end()
    assert driver.answer(done) == Answer()
    driver.roster.lose(0)
    again = driver.arrive(1, after=1, progress=9, is_done=True)
    assert driver.world(again) == World(number=2, members=(1,), progress=9, lease="name")


def test_the_same_members_pause_longer_each_time_and_are_refused_in_the_end(client, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    driver = Driver(client, max_retries=2)
    driver.begin(0, 1)
    for world, pause_s in ((1, 0.0), (2, 1.0), (3, 2.0)):
        numbers = driver.begin(0, 1, after=world, progress=5)
        if pause_s:
            assert driver.answer(numbers[0]) is None
            now[0] += pause_s - 0.1
            driver.roster.poll(0.0)
            assert driver.answer(numbers[0]) is None
            now[0] += 0.2
            driver.roster.poll(0.0)
        assert driver.world(numbers[0]).number == world + 1
    first, second = driver.begin(0, 1, after=4, progress=5)
    for number in (first, second):
        answer = driver.answer(number)
        assert answer is not None
        assert "without finishing a step" in answer.refusal
    assert driver.roster.failure
    assert driver.roster.retries == 4


def test_members_of_several_ranks_count_when_all_their_ranks_are_there(client):
    driver = Driver(client, least=2, most=6, group_size=2)
    numbers = [driver.arrive(member, place=place) for place in (1, 0) for member in (0, 1)]
    world = driver.world(numbers[0])
    assert (world.members, world.num_ranks) == ((0, 1), 4)
    assert [world.rank_of(1, place) for place in (0, 1)] == [2, 3]
    half = driver.arrive(0, place=1, after=1, progress=4)
    driver.roster.lose(1)
    assert driver.answer(half) is None
    driver.arrive(0, place=0, after=1, progress=5)
    assert driver.world(half) == World(number=2, members=(0,), group_size=2, progress=5, lease="name")


def test_a_member_of_which_some_ranks_have_returned_and_others_have_not_is_lost(client):
    driver = Driver(client, least=2, most=4, group_size=2)
    for place in (0, 1):
        driver.begin(0, 1, place=place)
    others = [driver.arrive(1, place=place, after=1, progress=9) for place in (0, 1)]
    driver.client.post(ARRIVALS, MemberArrival(member=0, place=1, is_done=True, has_left=True).to_json())
    late = driver.answer(driver.arrive(0, place=0, after=1, progress=9))
    assert late is not None
    assert late.refusal
    assert driver.world(others[0]).members == (1,)


def test_a_member_that_is_to_leave_does_so_once_another_one_has_the_state(client):
    driver = Driver(client)
    driver.roster.poll(0.0)
    driver.begin(0, 1)
    driver.roster.let_go(0)
    driver.roster.poll(0.0)
    assert client.check([LEAVE_KEY.format(1)])
    first, second = driver.begin(0, 1, after=1, progress=4)
    gone = driver.answer(first)
    assert gone is not None
    assert "asked to leave" in gone.refusal
    assert driver.world(second).members == (1,)
    driver.roster.let_go(1)
    driver.roster.poll(0.0)
    assert not client.check([LEAVE_KEY.format(2)])  # nobody else has its state
    third = driver.arrive(2)
    assert driver.world(driver.arrive(1, after=2, progress=5)).members == (1, 2)
    assert driver.world(third).number == 3
    driver.roster.poll(0.0)
    assert client.check([LEAVE_KEY.format(3)])


def test_a_member_that_is_to_leave_stays_if_the_other_one_is_lost_meanwhile(client):
    driver = Driver(client)
    driver.begin(0, 1)
    driver.roster.let_go(0)
    driver.roster.poll(0.0)
    driver.roster.lose(1)
    waiting = driver.arrive(0, after=1, progress=500)
    assert driver.world(waiting) == World(number=2, members=(0,), progress=500, lease="name")
    driver.arrive(2)
    assert client.check([LEAVE_KEY.format(2)])
    again = driver.arrive(0, after=2, progress=501)  # with the new one, to which it gives its state
    assert driver.world(again).members == (0, 2)
    driver.roster.poll(0.0)
    assert client.check([LEAVE_KEY.format(3)])


def test_a_run_that_is_over_breaks_its_world_and_refuses_another_one(client):
    driver = Driver(client)
    driver.begin(0, 1)
    driver.roster.break_up()
    assert client.get(BROKEN_KEY.format(1), 0.0) == b"the run is over"
    for member in (0, 1):
        answer = driver.answer(driver.arrive(member, after=1, progress=3))
        assert answer is not None
        assert "the run is over" in answer.refusal
    assert driver.roster.world is not None
    assert driver.roster.world.number == 1


def test_no_more_than_the_maximum_run_and_too_few_wait(client):
    driver = Driver(client, least=2, most=2)
    driver.begin(0, 1)
    driver.roster.lose(1)
    first = driver.arrive(0, after=1, progress=1)
    assert driver.answer(first) is None
    second, third = driver.begin(2, 3)
    assert driver.world(first).members == (0, 2)
    assert driver.answer(second) is not None
    assert driver.answer(third) is None


def test_a_member_learns_of_a_lost_one_while_it_opens_connections(client):
    from sparkdl.errors import RankLostError
    from sparkdl.launch.rank.membership import Membership

    driver = Driver(client.view("members"))
    broken: list[str] = []
    members = [Membership(client, number, 0, broken.append) for number in (0, 1)]
    threads = [threading.Thread(target=member.enter) for member in members]
    for thread in threads:
        thread.start()
    while driver.roster.world is None:
        driver.roster.poll(0.1)
    for thread in threads:
        thread.join()
    driver.roster.lose(1)
    with pytest.raises(RankLostError):
        members[0].unless_broken(threading.Event().wait, lambda _: None)
    with pytest.raises(RankLostError):
        members[0].rendezvous().get("never", 60.0)
    assert broken == ["member 1 was lost"] * 2  # on both members
