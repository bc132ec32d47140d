"""Homes: the same for everyone, even, and moved by as little as can be."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ConfigError, TierError
from kvoffload.tiers.base import FinishedBatch, RecordNames, RecordOutcome
from kvoffload.tiers.home_ring import (
    POINT_LIMIT,
    POINTS,
    HomeMember,
    HomeRing,
    join_homes,
    pick_hashes,
    split_by_home,
)

HASHES = b"".join(hashlib.sha256(str(at).encode()).digest() for at in range(20_000))
FEW = HASHES[: 32 * 500]

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
fleets = st.dictionaries(names, st.floats(1 / 16, 16), min_size=1, max_size=12).map(
    lambda weights: [HomeMember(name=name, weight=weight) for name, weight in weights.items()]
)


def equal_fleet(count: int) -> list[HomeMember]:
    return [HomeMember(name=f"node-{at}:5555") for at in range(count)]


def home_names(ring: HomeRing, hashes: bytes = FEW) -> list[str]:
    return [ring.members[home].name for home in ring.homes(hashes)]


# ---- the same for everyone ----


def test_homes_are_these_for_ever() -> None:
    """Other ones would make every record of every fleet a miss, while its members disagree."""
    ring = HomeRing([HomeMember(name="alpha"), HomeMember(name="beta"), HomeMember(name="gamma")])
    assert ring.homes(HASHES[:320]).tolist() == [0, 2, 1, 0, 2, 1, 2, 0, 2, 1]
    weighted = HomeRing([HomeMember(name="alpha", weight=0.25), HomeMember(name="beta", weight=3)])
    assert home_names(weighted, HASHES[:320]) == ["beta"] * 10
    uneven = HomeRing([*weighted.members, HomeMember(name="gamma")])
    assert uneven.homes(HASHES[:640]).tolist() == [1, 2, 1, 1, 2, 1, 1, 1, 2, 1, 2, 1, 1, 1, 1, 0, 1, 1, 2, 0]


def test_another_process_gives_the_same_homes() -> None:
    script = (
        "from kvoffload.tiers.home_ring import HomeMember, HomeRing\n"
        "ring = HomeRing([HomeMember(name=f'n{at}') for at in range(7)])\n"
        "print(ring.homes(bytes(range(256)) * 8).tolist())"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    own = HomeRing([HomeMember(name=f"n{at}") for at in range(7)]).homes(bytes(range(256)) * 8)
    assert done == [f"{own.tolist()}\n"] * 2


@given(fleets, st.randoms())
def test_the_order_of_members_does_not_matter(members: list[HomeMember], rng: random.Random) -> None:
    other = members[:]
    rng.shuffle(other)
    assert home_names(HomeRing(members)) == home_names(HomeRing(other))
    assert HomeRing(members).members == HomeRing(other).members


def test_a_hash_has_its_home_in_any_batch() -> None:
    ring = HomeRing(equal_fleet(5))
    one_by_one = [int(ring.homes(FEW[at : at + 32])[0]) for at in range(0, len(FEW), 32)]
    assert ring.homes(FEW).tolist() == one_by_one
    assert ring.homes(b"").tolist() == []
    with pytest.raises(TierError, match="33 bytes are no hashes"):
        ring.homes(bytes(33))


# ---- even ----


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_equal_members_have_shares_within_an_eighth(count: int) -> None:
    """The ring's own shares, to which the chance of the records is added."""
    homes = HomeRing(equal_fleet(count)).homes(_spread(200_000))
    shares = np.bincount(homes, minlength=count) * count / len(homes)
    assert shares.min() > 7 / 8
    assert shares.max() < 9 / 8


@given(fleets)
def test_shares_follow_weights(members: list[HomeMember]) -> None:
    ring = HomeRing(members)
    counts = np.bincount(ring.homes(HASHES), minlength=len(members))
    weights = np.array([member.weight for member in ring.members])
    shares = weights / weights.sum()
    # Six sigma of the points, which are few where a weight is small, and of the records.
    sigma = np.sqrt(shares**2 / (POINTS * weights) + shares / 20_000)
    assert (np.abs(counts / 20_000 - shares) < 6 * sigma + 1e-4).all()


def test_hashes_that_differ_in_few_bits_are_spread_all_the_same() -> None:
    for offset in (0, 8, 16, 28):
        blob = np.zeros((4096, 32), np.uint8)
        blob[:, offset : offset + 2] = np.arange(4096, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
        counts = np.bincount(HomeRing(equal_fleet(8)).homes(blob.tobytes()), minlength=8)
        assert counts.min() > 512 * 0.75
        assert counts.max() < 512 * 1.25


# ---- moved as little as can be ----


@given(fleets, names, st.floats(1 / 16, 16))
def test_who_joins_takes_records_and_nobody_else_does(members: list[HomeMember], name: str, weight: float) -> None:
    others = [member for member in members if member.name != name]
    if not others:
        return
    before = home_names(HomeRing(others))
    after = home_names(HomeRing([*others, HomeMember(name=name, weight=weight)]))
    assert all(new in (old, name) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("count", [2, 4, 16, 64])
def test_one_of_n_more_moves_about_a_share(count: int) -> None:
    blob = _spread(100_000)
    before = home_names(HomeRing(equal_fleet(count)), blob)
    after = home_names(HomeRing(equal_fleet(count + 1)), blob)
    moved = sum(old != new for old, new in zip(before, after, strict=True)) / len(before)
    assert 7 / 8 < moved * (count + 1) < 9 / 8


@given(fleets, st.data())
def test_a_weight_that_grows_takes_from_others_only(members: list[HomeMember], data: st.DataObject) -> None:
    grown = data.draw(st.sampled_from(members))
    more = HomeMember(name=grown.name, weight=data.draw(st.floats(grown.weight, 16)))
    before = home_names(HomeRing(members))
    after = home_names(HomeRing([*(member for member in members if member is not grown), more]))
    assert all(new in (old, grown.name) for old, new in zip(before, after, strict=True))


@given(fleets, st.data())
def test_a_ring_without_members_is_the_ring_of_the_others(members: list[HomeMember], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.sampled_from([member.name for member in members])))
    left = [member for member in members if member.name not in gone]
    if left:
        ring = HomeRing(members).without(gone)
        assert ring.members == HomeRing(left).members
        assert ring.homes(FEW).tolist() == HomeRing(left).homes(FEW).tolist()
        assert ring.without(()).homes(FEW).tolist() == ring.homes(FEW).tolist()
    else:
        with pytest.raises(ConfigError, match="without members"):
            HomeRing(members).without(gone)


@given(fleets, st.integers(0, 499))
def test_the_next_home_is_that_of_the_ring_without_the_first(members: list[HomeMember], at: int) -> None:
    block_hash = FEW[32 * at : 32 * at + 32]
    ring = HomeRing(members)
    order = ring.order(block_hash, len(members) + 3)
    assert sorted(member.name for member in order) == sorted(member.name for member in members)
    assert ring.order(block_hash, 2) == order[:2]
    for gone in range(len(order)):
        rest = ring.without([member.name for member in order[:gone]])
        assert home_names(rest, block_hash) == [order[gone].name]


# ---- refused ----


def test_fleets_that_are_none_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="without members") as fault:
        HomeRing([])
    assert "\n" not in str(fault.value)
    with pytest.raises(ConfigError, match=r"two members .* 'a'; name each once"):
        HomeRing([HomeMember(name="a"), HomeMember(name="b"), HomeMember(name="a", weight=2)])
    for weight in (0, -1, 1 / 32, 17, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"allowed are weights from 0\.0625 to 16"):
            HomeMember(name="a", weight=weight)
    for name in ("", "n" * 256):
        with pytest.raises(ConfigError, match="1 to 255 bytes"):
            HomeMember(name=name)
    with pytest.raises(ConfigError, match=f"allowed are {POINT_LIMIT}"):
        HomeRing(HomeMember(name=str(at), weight=16) for at in range(65))


# ---- batches ----


@given(st.integers(0, 60), st.integers(1, 7))
def test_a_batch_is_split_by_home_and_joined_again(count: int, members: int) -> None:
    batch = RecordNames(fingerprint=bytes(32), hashes=HASHES[: 32 * count], group=2, shard=1)
    homes = HomeRing(equal_fleet(members)).homes(batch.hashes)
    parts = split_by_home(batch, homes)
    assert sorted(int(place) for part in parts for place in part.places) == list(range(count))
    assert [part.home for part in parts] == sorted(set(homes.tolist()))
    answers = []
    for part in parts:
        assert (homes[part.places] == part.home).all()
        assert (np.diff(part.places) > 0).all()
        assert part.names.hashes == b"".join(HASHES[32 * at : 32 * at + 32] for at in part.places)
        assert (part.names.fingerprint, part.names.group, part.names.shard) == (bytes(32), 2, 1)
        found = FinishedBatch(
            ticket=9,
            outcomes=np.full(len(part.places), RecordOutcome.FOUND, np.uint8),
            digests=part.places.astype(np.uint64) + np.uint64(1),
            parents=part.names.hashes,
        )
        answers.append((part, found))
    whole = join_homes(5, count, answers, otherwise=RecordOutcome.UNAVAILABLE)
    assert whole.ticket == 5
    assert whole.count(RecordOutcome.FOUND) == count
    assert whole.digests.tolist() == list(range(1, count + 1))
    assert whole.parents == batch.hashes


def test_a_home_that_is_away_leaves_its_places_to_the_others() -> None:
    batch = RecordNames(fingerprint=bytes(32), hashes=HASHES[: 32 * 40])
    homes = HomeRing(equal_fleet(4)).homes(batch.hashes)
    away, *others = split_by_home(batch, homes)
    none = np.empty(0, np.uint64)
    answers = [
        (part, FinishedBatch(ticket=1, outcomes=np.full(len(part.places), 2, np.uint8), digests=none, parents=b""))
        for part in others
    ]
    whole = join_homes(1, 40, answers, otherwise=RecordOutcome.UNAVAILABLE)
    assert set(whole.outcomes[away.places]) == {RecordOutcome.UNAVAILABLE}
    assert whole.count(RecordOutcome.WRITTEN) == 40 - len(away.places)
    assert whole.parents == bytes(32 * 40)
    with pytest.raises(TierError, match="came back"):
        join_homes(1, 40, [(away, answers[0][1])], otherwise=RecordOutcome.UNAVAILABLE)


def test_a_blob_without_hashes_has_none_anywhere() -> None:
    assert pick_hashes(b"", np.array([0, 3])) == b""


def _spread(count: int) -> bytes:
    return np.random.default_rng(5).bytes(32 * count)
