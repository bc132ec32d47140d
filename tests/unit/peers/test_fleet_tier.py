"""A fleet's memory as one tier, over members whose tiers are plain ones."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.errors import TierError
from kvoffload.peers.fleet_tier import FleetTier
from kvoffload.tiers.base import CLOSE_TIMEOUT_S, RecordOutcome, Tier, TierHealth, TierState
from kvoffload.units import MIB
from tests.kit.scarce_threads import scarce_threads
from tests.kit.server.tiers import await_that
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier
from tests.kit.tiers.tier_contract import TIMEOUT_S, Records, TierContract, finish, get, hashes_of, look, put

OWN = "b"


def homes_by_first_byte(members: tuple[str, ...], hashes: bytes) -> npt.NDArray[np.intp]:
    first = np.frombuffer(hashes, np.uint8).reshape(-1, 32)[:, 0]
    return first.astype(np.intp) % len(members)


def homes_but_here(members: tuple[str, ...], hashes: bytes) -> npt.NDArray[np.intp]:
    """Finds homes of which none is OWN."""
    others = [at for at, name in enumerate(members) if name != OWN]
    return np.array(others, np.intp)[homes_by_first_byte(tuple(members[at] for at in others), hashes)]


class Member(FaultyTier):
    """A member that may go away."""

    is_absent = False
    is_closed = False
    times_lost = 0

    def __init__(self) -> None:
        super().__init__(MemoryTier(), lambda verb, place: None)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.is_closed = True
        super().close(timeout_s)

    def health(self) -> list[TierHealth]:
        if self.is_absent:
            return [TierHealth(name="gone", state=TierState.ABSENT, reason="it is gone")]
        return [replace(one, counts={"lost": self.times_lost}) for one in super().health()]


class TestFleetTier(TierContract):
    is_listed = False

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = FleetTier(OWN, {"a": MemoryTier(16 * MIB), "c": MemoryTier(16 * MIB)}, homes_but_here)
        yield tier
        tier.close()


class Setting:
    def __init__(self) -> None:
        self.members = {"a": Member(), "c": Member()}
        self.tier = FleetTier(OWN, self.members, homes_by_first_byte)

    def open(self, name: str) -> Member:
        self.members[name] = Member()
        return self.members[name]


@pytest.fixture
def fleet() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.tier.close()


def home_names(fleet: Setting, hashes: bytes, *members: str) -> list[str]:
    return [members[at] for at in homes_by_first_byte(members, hashes)]


def test_each_record_goes_to_its_home_and_to_no_other(fleet: Setting) -> None:
    records = Records(0, 60, 500, filled=True)
    assert put(fleet.tier, records).count(RecordOutcome.WRITTEN) == 60
    homes = home_names(fleet, records.names.hashes, "a", "b", "c")
    for name, member in fleet.members.items():
        assert member.contains(records.names).tolist() == [home == name for home in homes]
    assert fleet.tier.is_home(records.names.hashes).tolist() == [home == OWN for home in homes]
    assert set(homes) == {"a", "b", "c"}


def test_what_lives_here_is_not_asked_for(fleet: Setting) -> None:
    records = Records(0, 60, 500, filled=True)
    put(fleet.tier, records)
    homes = home_names(fleet, records.names.hashes, "a", "b", "c")
    assert look(fleet.tier, records.names) == [home != OWN for home in homes]
    read = Records(0, 60, 500, filled=False)
    ended = get(fleet.tier, read)
    found = np.array([home != OWN for home in homes])
    assert ((ended.outcomes == RecordOutcome.FOUND) == found).all()
    assert np.array_equal(read.memory[found], records.memory[found])
    assert (ended.digests[found] == records.digests[found]).all()
    parents = np.frombuffer(ended.parents, np.uint8).reshape(-1, 32)
    assert np.array_equal(parents[found], np.frombuffer(records.parents, np.uint8).reshape(-1, 32)[found])


def test_while_a_member_is_absent_its_records_live_elsewhere(fleet: Setting) -> None:
    fleet.members["c"].is_absent = True
    records = Records(0, 60, 500, filled=True)
    put(fleet.tier, records)
    homes = home_names(fleet, records.names.hashes, "a", "b")
    assert fleet.members["a"].contains(records.names).tolist() == [home == "a" for home in homes]
    assert not fleet.members["c"].contains(records.names).any()
    assert fleet.tier.is_home(records.names.hashes).tolist() == [home == OWN for home in homes]


def test_a_server_that_leaves_has_other_homes_for_all_records(fleet: Setting) -> None:
    records = Records(0, 60, 500, filled=True)
    was_here = fleet.tier.is_home(records.names.hashes)
    wants = fleet.tier.leave()
    assert wants is not None
    assert wants(records.names.hashes).tolist() == was_here.tolist()
    assert 0 < was_here.sum() < 60
    assert put(fleet.tier, records).count(RecordOutcome.WRITTEN) == 60
    homes = home_names(fleet, records.names.hashes, "a", "c")
    for name, member in fleet.members.items():
        assert member.contains(records.names).tolist() == [home == name for home in homes]
    assert not fleet.tier.is_home(records.names.hashes).any()


def test_the_last_server_of_a_fleet_hands_nothing_over(fleet: Setting) -> None:
    records = Records(0, 60, 500, filled=True)
    for member in fleet.members.values():
        member.is_absent = True
    assert fleet.tier.leave() is None
    assert put(fleet.tier, records).count(RecordOutcome.UNAVAILABLE) == 60


def test_a_member_that_comes_back_gets_its_records_once(fleet: Setting) -> None:
    hashes = Records(0, 60, 500, filled=True).names.hashes
    homes = home_names(fleet, hashes, "a", "b", "c")
    wants = fleet.tier.find_moved()
    assert wants is not None
    assert wants(hashes).tolist() == [home != OWN for home in homes]
    assert fleet.tier.find_moved() is None
    fleet.members["c"].is_absent = True
    assert fleet.tier.find_moved() is None
    fleet.members["c"].is_absent = False
    wants = fleet.tier.find_moved()
    assert wants is not None
    assert wants(hashes).tolist() == [home == "c" for home in homes]
    # It was away between two calls.
    fleet.members["a"].times_lost += 1
    wants = fleet.tier.find_moved()
    assert wants is not None
    assert wants(hashes).tolist() == [home == "a" for home in homes]
    assert fleet.tier.find_moved() is None


def test_a_server_alone_is_the_home_of_all() -> None:
    tier = FleetTier(OWN, {}, homes_by_first_byte)
    records = Records(0, 5, 500, filled=True)
    assert put(tier, records).count(RecordOutcome.WRITTEN) == 5
    assert tier.is_home(records.names.hashes).all()
    assert not any(look(tier, records.names))
    assert tier.health() == []
    tier.close()


def test_a_batch_ends_when_the_last_of_its_parts_has(fleet: Setting) -> None:
    records = Records(0, 60, 500, filled=True)
    fleet.members["a"].is_held = True
    ticket = fleet.tier.put(records.batch(), timeout_s=TIMEOUT_S)
    select.select([fleet.tier], [], [], 0.01)
    assert fleet.tier.poll() == []
    fleet.members["a"].is_held = False
    assert finish(fleet.tier, ticket).count(RecordOutcome.WRITTEN) == 60


def test_a_member_that_takes_no_more_batches_is_unavailable_for_its_part_alone(
    fleet: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.members["a"], "look", lambda names, *, timeout_s: None)
    hashes = hashes_of(0, 60)
    ended = finish(fleet.tier, fleet.tier.look(Records(0, 60, 5, filled=False).names, timeout_s=TIMEOUT_S))
    homes = home_names(fleet, hashes, "a", "b", "c")
    wanted = [RecordOutcome.UNAVAILABLE if home == "a" else RecordOutcome.MISSING for home in homes]
    assert ended.outcomes.tolist() == wanted


# ---- members that come and go ----


def set_members(fleet: Setting, **places: str) -> None:
    fleet.tier.set_members({name: lambda name=name: fleet.open(name) for name in places}, places)


def test_who_comes_is_a_home_and_who_goes_is_none(fleet: Setting) -> None:
    records = Records(0, 60, 500, filled=True)
    set_members(fleet, a="1", c="2", d="3")
    put(fleet.tier, records)
    homes = home_names(fleet, records.names.hashes, "a", "b", "c", "d")
    for name, member in fleet.members.items():
        assert member.contains(records.names).tolist() == [home == name for home in homes]
    set_members(fleet, d="3")
    assert set(fleet.tier.members) == {"d"}
    homes = home_names(fleet, records.names.hashes, "b", "d")
    assert fleet.tier.is_home(records.names.hashes).tolist() == [home == OWN for home in homes]
    await_that(lambda: fleet.members["a"].is_closed and fleet.members["c"].is_closed)
    assert not fleet.members["d"].is_closed


def test_what_is_under_way_ends_before_its_member_goes(fleet: Setting) -> None:
    records = Records(0, 60, 500, filled=True)
    set_members(fleet, a="1", c="2")
    fleet.members["a"].is_held = True
    ticket = fleet.tier.put(records.batch(), timeout_s=TIMEOUT_S)
    set_members(fleet, c="2")
    assert set(fleet.tier.members) == {"a", "c"}
    homes = home_names(fleet, records.names.hashes, "b", "c")
    assert fleet.tier.is_home(records.names.hashes).tolist() == [home == OWN for home in homes]
    fleet.members["a"].is_held = False
    assert finish(fleet.tier, ticket).count(RecordOutcome.WRITTEN) == 60
    assert set(fleet.tier.members) == {"c"}


def test_who_has_moved_is_opened_anew(fleet: Setting) -> None:
    set_members(fleet, a="1", c="2", d="3")
    before = fleet.members["d"]
    set_members(fleet, a="1", c="2", d="4")
    set_members(fleet, a="1", c="2", d="4")
    assert fleet.members["d"] is not before
    await_that(lambda: before.is_closed)
    set_members(fleet, a="1", c="2", d="4")
    assert not fleet.members["d"].is_closed


def test_members_are_closed_together() -> None:
    together = threading.Barrier(3, timeout=60)

    class Slow(Member):
        def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
            together.wait()
            super().close(timeout_s)
            if self is not good:
                raise TierError("not in time")

    good = Slow()
    tier = FleetTier(OWN, {"a": good, "c": Slow(), "d": Slow()}, homes_by_first_byte)
    with pytest.raises(TierError, match="not in time; not in time"):
        tier.close()


def test_nobody_waits_while_a_member_is_opened(fleet: Setting) -> None:
    def open_slowly() -> Member:
        # The thread of the loop is not held up.
        others = threading.Thread(target=lambda: (fleet.tier.poll(), fleet.tier.is_home(hashes_of(0, 3))))
        others.start()
        others.join(30)
        assert not others.is_alive()
        return fleet.open("d")

    fleet.tier.set_members({"a": Member, "c": Member, "d": open_slowly}, {"a": "1", "c": "2", "d": "3"})
    assert set(fleet.tier.members) == {"a", "c", "d"}


def test_a_fleet_that_is_closed_meanwhile_lets_go_of_a_new_member() -> None:
    made = Setting()

    def open_late() -> Member:
        made.tier.close()
        return made.open("d")

    made.tier.set_members({"d": open_late}, {"d": "3"})
    assert made.members["d"].is_closed


def test_a_closed_fleet_takes_nobody() -> None:
    made = Setting()
    made.tier.close()
    set_members(made, d="1")
    assert "d" not in made.members


def test_a_member_that_leaves_is_closed_once_a_thread_can_be_started(fleet: Setting) -> None:
    set_members(fleet, a="1", c="2")
    with scarce_threads():
        set_members(fleet, c="2")
        fleet.tier.poll()
        assert not fleet.members["a"].is_closed
        assert list(fleet.tier.members) == ["c"]
    fleet.tier.poll()
    await_that(lambda: fleet.members["a"].is_closed)


def test_without_threads_the_end_closes_all(fleet: Setting) -> None:
    set_members(fleet, a="1", c="2")
    with scarce_threads():
        set_members(fleet, c="2")
        fleet.tier.close()
    assert all(member.is_closed for member in fleet.members.values())


def test_a_member_that_cannot_be_opened_is_tried_again_and_logged_once(
    fleet: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Tier:
        raise TierError("no thread can be started")

    for _ in range(3):
        fleet.tier.set_members({"a": fail, "d": fail, "c": lambda: fleet.open("c")}, {"a": "1", "d": "3", "c": "2"})
        assert sorted(fleet.tier.members) == ["a", "c"]
    assert len(caplog.records) == 1
    set_members(fleet, a="1", c="2", d="3")
    assert sorted(fleet.tier.members) == ["a", "c", "d"]
