"""Sections of index objects, and what a server remembers of them: as tables, without a store."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

import pytest

from kvoffload.tiers.s3_index import (
    PACK_LIMIT,
    PLACE_LIMIT,
    READ_BYTES,
    IndexPart,
    ListedIndex,
    PackedRecord,
    PackIndex,
    PackPlace,
    Section,
    SectionKind,
    read_sections,
)

SPACE = "space"
BEGIN = datetime(2026, 11, 23, tzinfo=UTC)


def name(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def section(pack: int, first: int, count: int = 3, kind: SectionKind = SectionKind.PACKED) -> Section:
    records = [PackedRecord(block_hash=name(first + i), offset=100 * i, size_bytes=100) for i in range(count)]
    return Section(kind=kind, pack=bytes([pack]) * 16, records=records)


def learn(index: PackIndex, path: str, *sections: Section, start: int = 0) -> int:
    data = b"".join(one.write() for one in sections)
    index.learn(SPACE, IndexPart(path=path, start=start, end=start + len(data)), data)
    return start + len(data)


def packs_of(index: PackIndex, number: int) -> list[int]:
    [places] = index.find(SPACE, [name(number)])
    return [place.pack[0] for place in places]


def listed(path: str, size_bytes: int, age_s: int = 0) -> ListedIndex:
    return ListedIndex(path=path, size_bytes=size_bytes, changed=BEGIN - timedelta(seconds=age_s))


def test_sections_are_read_up_to_the_first_that_is_damaged() -> None:
    sections = [section(1, 0), section(2, 5, kind=SectionKind.REMOVED), section(3, 9, count=0)]
    data = b"".join(one.write() for one in sections)
    assert read_sections(data) == sections
    for length in range(len(data)):
        assert read_sections(data[:length]) == sections[: len(read_sections(data[:length]))]
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        found = read_sections(broken)
        assert found == sections[: len(found)]
        assert len(found) < 3


def test_what_cannot_be_of_this_project_is_not_read() -> None:
    far = PackedRecord(block_hash=name(1), offset=PACK_LIMIT - 99, size_bytes=100)
    near = PackedRecord(block_hash=name(2), offset=PACK_LIMIT - 100, size_bytes=100)
    for record, is_read in ((far, False), (near, True)):
        one = Section(kind=SectionKind.PACKED, pack=bytes(16), records=[record])
        assert read_sections(one.write()) == [one] * is_read
    parts = PackIndex().plan(SPACE, [listed("long", READ_BYTES + 1), listed("short", READ_BYTES - 1)])
    assert [part.path for part in parts] == ["short"]


def test_each_place_of_a_record_is_known_the_newest_first() -> None:
    index = PackIndex()
    end = learn(index, "a", section(1, 0))
    learn(index, "b", section(2, 1))
    learn(index, "a", section(3, 2), start=end)
    assert [packs_of(index, number) for number in range(6)] == [[1], [2, 1], [3, 2, 1], [3, 2], [3], []]
    assert index.find(SPACE, [name(4)]) == [[PackPlace(bytes([3]) * 16, 200, 100)]]
    index.forget_pack(SPACE, bytes([2]) * 16)
    assert [packs_of(index, number) for number in range(4)] == [[1], [1], [3, 1], [3]]
    index.forget_record(SPACE, PackPlace(bytes([1]) * 16, 0, 100))
    assert packs_of(index, 0) == []
    assert index.find("another", [name(1)]) == [[]]


def test_of_many_places_of_one_record_a_few_are_tried_the_newest_first() -> None:
    """A user who may write to the bucket can list as many places as an index has room for."""
    index = PackIndex()
    end = 0
    for pack in range(1, 101):
        end = learn(index, "a", section(pack, 0, count=1), start=end)
    found = packs_of(index, 0)
    assert found[:PLACE_LIMIT] == sorted(found, reverse=True)[:PLACE_LIMIT]
    assert found[0] == 100
    # A hundred records are in at most seven sorted runs.
    assert len(found) <= 7 * PLACE_LIMIT
    many = Section(kind=SectionKind.PACKED, pack=bytes(16), records=section(1, 0, count=1).records * 1000)
    learn(index, "b", many)
    assert len(packs_of(index, 0)) == PLACE_LIMIT


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_was_removed_is_so_whichever_is_read_first(order: tuple[int, int]) -> None:
    index = PackIndex()
    sections = section(1, 0), section(1, 0, count=2, kind=SectionKind.REMOVED)
    for at in order:
        learn(index, str(at), sections[at])
    assert [packs_of(index, number) for number in range(3)] == [[], [], [1]]


def test_what_is_behind_what_was_read_is_planned() -> None:
    index = PackIndex()
    assert index.plan(SPACE, [listed("a", 10, 5), listed("b", 20, 1)]) == [
        IndexPart(path="b", start=0, end=20),
        IndexPart(path="a", start=0, end=10),
    ]
    end = learn(index, "a", section(1, 0))
    assert index.plan(SPACE, [listed("a", end + 7)]) == [IndexPart(path="a", start=end, end=end + 7)]
    assert index.plan(SPACE, [listed("a", end)]) == []
    assert index.plan(SPACE, [listed("a", end - 1)]) == [], "a list of before"
    learn(index, "a", section(2, 0))
    assert packs_of(index, 0) == [1], "the same part is not learned twice"
    learn(index, "c", section(3, 7))
    assert packs_of(index, 7) == [3]


def test_damage_in_an_index_object_is_not_read_again_and_again() -> None:
    index = PackIndex()
    index.learn(SPACE, IndexPart(path="a", start=0, end=9), b"not so")
    assert index.plan(SPACE, [listed("a", 9)]) == []


def test_one_question_reads_so_much_and_the_next_one_reads_on() -> None:
    index = PackIndex()
    size = 3 << 20
    objects = [listed(str(age), size, age) for age in range(5)]
    first = index.plan(SPACE, objects)
    assert [part.path for part in first] == ["0", "1", "2"]
    for part in first:
        index.learn(SPACE, part, b"")
    assert [part.path for part in index.plan(SPACE, objects)] == ["3", "4"]


def test_what_is_remembered_is_bounded_and_the_newest_stays() -> None:
    index = PackIndex(limit=100)
    for at in range(12):
        learn(index, str(at), section(at, 10 * at, count=10))
        assert packs_of(index, 10 * at) in ([at], []), at
    objects = [listed(str(at), len(section(at, 0, count=10).write()), age_s=100 - at) for at in range(12)]
    anew = PackIndex(limit=100)
    for part in anew.plan(SPACE, objects):
        at = int(part.path)
        learn(anew, part.path, section(at, 10 * at, count=10))
    assert [packs_of(anew, 10 * at) for at in range(12)] == [[]] * 7 + [[7], [8], [9], [10], [11]]
    assert anew.plan(SPACE, objects) == [], "older ones are left alone"
    assert [part.path for part in anew.plan(SPACE, [listed("12", 448)])] == ["12"]


def test_a_space_that_nobody_asks_for_goes_first() -> None:
    index = PackIndex(limit=25)
    one = section(1, 0, count=10)
    for space in ("a", "b", "a", "c"):
        index.learn(space, IndexPart(path="p", start=0, end=len(one.write())), one.write())
    assert [bool(index.find(space, [name(0)])[0]) for space in ("a", "b", "c")] == [True, False, True]


def test_many_small_sections_are_found_as_one_large_one() -> None:
    index = PackIndex()
    end = 0
    for at in range(300):
        end = learn(index, "a", section(at % 200, 2 * at, count=2), start=end)
    assert all(packs_of(index, number) == [number // 2 % 200] for number in range(600))
