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
from kvoffload.tiers.homes import find_homes, join_homes, pick_hashes, split_by_home

HASHES = b"".join(hashlib.sha256(str(at).encode()).digest() for at in range(20_000))
FEW = HASHES[: 32 * 500]

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
fleets = st.sets(names, min_size=1, max_size=12).map(lambda members: tuple(sorted(members)))


def equal_fleet(count: int) -> tuple[str, ...]:
    return tuple(sorted(f"node-{at}:5555" for at in range(count)))


def home_names(members: tuple[str, ...], hashes: bytes = FEW) -> list[str]:
    return [members[home] for home in find_homes(members, hashes)]


# ---- the same for everyone ----


def test_homes_are_these_for_ever() -> None:
    """Other ones would make every record of every fleet a miss, while its members disagree."""
    assert find_homes(("alpha", "beta", "gamma"), HASHES[:320]).tolist() == [0, 0, 2, 2, 1, 2, 0, 0, 1, 2]
    assert find_homes(equal_fleet(64), HASHES[:320]).tolist() == [9, 45, 21, 40, 45, 24, 11, 60, 23, 41]


def test_another_process_gives_the_same_homes() -> None:
    script = (
        "from kvoffload.tiers.homes import find_homes\n"
        "print(find_homes(tuple(f'n{at}' for at in range(7)), bytes(range(256)) * 8).tolist())"
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
    own = find_homes(tuple(f"n{at}" for at in range(7)), bytes(range(256)) * 8)
    assert done == [f"{own.tolist()}\n"] * 2


@given(fleets, st.randoms())
def test_the_order_of_members_does_not_matter(members: tuple[str, ...], rng: random.Random) -> None:
    other = list(members)
    rng.shuffle(other)
    assert home_names(members) == home_names(tuple(other))


def test_a_hash_has_its_home_in_any_batch() -> None:
    members = equal_fleet(5)
    one_by_one = [int(find_homes(members, HASHES[at : at + 32])[0]) for at in range(0, 32 * 1500, 32)]
    assert find_homes(members, HASHES[: 32 * 1500]).tolist() == one_by_one
    assert find_homes(members, b"").tolist() == []
    with pytest.raises(TierError, match="33 bytes are no hashes"):
        find_homes(members, bytes(33))


# ---- even ----


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_members_have_equal_shares(count: int) -> None:
    """Within six sigma of what the chance of the records does, and within an eighth."""
    homes = find_homes(equal_fleet(count), _spread(200_000))
    shares = np.bincount(homes, minlength=count) * count / len(homes)
    off = min(6 * np.sqrt(count / len(homes)), 1 / 8)
    assert np.abs(shares - 1).max() < off


def test_hashes_that_differ_in_few_bits_are_spread_all_the_same() -> None:
    for offset in (0, 8, 16, 28):
        blob = np.zeros((4096, 32), np.uint8)
        blob[:, offset : offset + 2] = np.arange(4096, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
        counts = np.bincount(find_homes(equal_fleet(8), blob.tobytes()), minlength=8)
        assert counts.min() > 512 * 0.75
        assert counts.max() < 512 * 1.25


# ---- moved as little as can be ----


@given(fleets, names)
def test_who_joins_takes_records_and_nobody_else_does(members: tuple[str, ...], name: str) -> None:
    others = tuple(member for member in members if member != name)
    if not others:
        return
    before = home_names(others)
    after = home_names(tuple(sorted([*others, name])))
    assert all(new in (old, name) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("count", [2, 4, 16, 64])
def test_one_of_n_more_moves_about_a_share(count: int) -> None:
    blob = _spread(100_000)
    before = home_names(equal_fleet(count), blob)
    after = home_names(equal_fleet(count + 1), blob)
    moved = sum(old != new for old, new in zip(before, after, strict=True)) / len(before)
    assert 7 / 8 < moved * (count + 1) < 9 / 8


@given(fleets, st.data())
def test_only_records_of_members_that_go_move(members: tuple[str, ...], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.sampled_from(members)))
    left = tuple(member for member in members if member not in gone)
    if left:
        before, after = home_names(members), home_names(left)
        assert all(new == old or old in gone for old, new in zip(before, after, strict=True))


def test_what_a_member_leaves_goes_to_all_others() -> None:
    members, blob = equal_fleet(16), _spread(100_000)
    left = tuple(member for member in members if member != "node-3:5555")
    moved = np.array(home_names(members, blob)) == "node-3:5555"
    counts = np.bincount(find_homes(left, blob)[moved], minlength=len(left))
    assert counts.min() > counts.mean() * 0.7
    assert counts.max() < counts.mean() * 1.3


# ---- refused ----


def test_a_fleet_without_members_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="without members") as fault:
        find_homes((), FEW)
    assert "\n" not in str(fault.value)


# ---- batches ----


@given(st.integers(0, 60), st.integers(1, 7))
def test_a_batch_is_split_by_home_and_joined_again(count: int, members: int) -> None:
    batch = RecordNames(fingerprint=bytes(32), hashes=HASHES[: 32 * count], group=2, shard=1)
    homes = find_homes(equal_fleet(members), batch.hashes)
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
    homes = find_homes(equal_fleet(4), batch.hashes)
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
