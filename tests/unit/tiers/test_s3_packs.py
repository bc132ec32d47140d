"""Packs and their index objects: what many write and remove at once, and what ends half-way."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("obstore", reason="obstore is not installed")

import obstore

from kvoffload.tiers.base import RecordNames
from kvoffload.tiers.envelope import HEAD_BYTES, RecordHead, RecordName, read_head
from kvoffload.tiers.s3 import S3Settings, S3Store
from kvoffload.tiers.s3_packs import INDEX_BYTES, PACK_BYTES
from tests.kit.tiers.s3_server import S3Server, client
from tests.kit.tiers.tier_contract import FINGERPRINT, hashes_of

Values = list[tuple[bytes, bytes]]


def names(first: int, count: int, fingerprint: bytes = FINGERPRINT) -> list[RecordName]:
    given = RecordNames(fingerprint=fingerprint, hashes=hashes_of(first, count))
    return [RecordName(given.fingerprint, 0, 0, given.hashes[at : at + 32]) for at in range(0, len(given.hashes), 32)]


def keys(first: int, count: int) -> list[bytes]:
    return [name.key for name in names(first, count)]


def values(first: int, count: int, size: int = 50) -> Values:
    return [(RecordHead(name, size, 7, bytes(32)).pack(), name.block_hash[:1] * size) for name in names(first, count)]


@pytest.fixture
def settings(moto: S3Server) -> S3Settings:
    return moto.settings()


@pytest.fixture
def store(settings: S3Settings) -> Iterator[S3Store]:
    store = settings.open_store()
    yield store
    store.close()


def there(store: S3Store, first: int, count: int) -> list[bool]:
    found = store.get(keys(first, count), HEAD_BYTES + 50)
    for value, parts in zip(found, values(first, count), strict=True):
        assert value is None or bytes(value) == b"".join(parts)
    assert [value is not None for value in found] == store.look(keys(first, count))
    return [value is not None for value in found]


def paths_of(settings: S3Settings, part: str) -> list[str]:
    return [one["path"] for page in obstore.list(client(settings)) for one in page if part in one["path"]]


def test_records_of_a_batch_are_packed_in_their_order(settings: S3Settings, store: S3Store) -> None:
    size = PACK_BYTES // 40
    assert store.put(keys(0, 100), values(0, 100, size)) == [True] * 100
    packs = [bytes(obstore.get(client(settings), path).bytes()) for path in sorted(paths_of(settings, "/pack/"))]
    assert [len(pack) // (size + HEAD_BYTES) for pack in packs] == [39, 39, 22]
    assert all(len(pack) <= PACK_BYTES for pack in packs)
    joined, at = b"".join(packs), 0
    for name in names(0, 100):
        head = read_head(joined[at : at + HEAD_BYTES])
        assert isinstance(head, RecordHead)
        assert head.name == name
        at += HEAD_BYTES + size
    assert len(paths_of(settings, "/index-")) == 1


def test_index_objects_have_an_end(settings: S3Settings, store: S3Store) -> None:
    per_object = INDEX_BYTES // 40
    for first in range(0, per_object + 200, 100):
        assert all(store.put(keys(first, 100), values(first, 100)))
    assert len(paths_of(settings, "/index-")) == 2
    assert max(obstore.head(client(settings), path)["size"] for path in paths_of(settings, "/index-")) <= INDEX_BYTES
    other = settings.open_store()
    assert all(there(other, 0, per_object + 200))
    other.close()


def test_a_pack_without_its_index_is_nothing_and_is_written_again(settings: S3Settings, store: S3Store) -> None:
    store.put(keys(0, 5), values(0, 5))
    obstore.delete(client(settings), paths_of(settings, "/index-"))
    other = settings.open_store()
    assert there(other, 0, 5) == [False] * 5
    assert other.put(keys(0, 5), values(0, 5)) == [True] * 5
    assert there(other, 0, 5) == [True] * 5
    assert there(store, 0, 5) == [True] * 5
    other.close()


def test_an_index_object_that_somebody_else_has_written_to_is_left_to_him(settings: S3Settings, store: S3Store) -> None:
    store.put(keys(0, 2), values(0, 2))
    [path] = paths_of(settings, "/index-")
    obstore.put(client(settings), path, b"mine")
    assert store.put(keys(5, 2), values(5, 2)) == [True, True]
    assert bytes(obstore.get(client(settings), path).bytes()) == b"mine"
    other = settings.open_store()
    assert there(other, 0, 7) == [False] * 5 + [True] * 2
    other.close()


def test_what_is_removed_is_gone_for_whoever_knows_its_place(settings: S3Settings, store: S3Store) -> None:
    store.put(keys(0, 5), values(0, 5))
    knows = settings.open_store()
    assert there(knows, 0, 5) == [True] * 5
    remover = settings.open_store()
    assert remover.remove(keys(1, 2) + keys(90, 1)) == [True, True, False]
    left = [True, False, False, True, True]
    for one in (knows, store, remover, settings.open_store()):
        assert [value is not None for value in one.get(keys(0, 5), HEAD_BYTES + 50)] == left
        assert there(one, 0, 5) == left
        assert one.remove(keys(1, 2)) == [False, False]
    [pack] = paths_of(settings, "/pack/")
    assert values(1, 1)[0][1] not in bytes(obstore.get(client(settings), pack).bytes())
    assert knows.put(keys(1, 2), values(1, 2)) == [True, True]
    assert there(store, 0, 5) == [True] * 5


def test_an_empty_pack_is_removed(settings: S3Settings, store: S3Store) -> None:
    store.put(keys(0, 3), values(0, 3))
    assert store.remove(keys(0, 2)) == [True, True]
    assert len(paths_of(settings, "/pack/")) == 1
    assert store.remove(keys(2, 1)) == [True]
    assert paths_of(settings, "/pack/") == []
    assert there(settings.open_store(), 0, 3) == [False] * 3


def test_several_remove_from_one_pack_at_once(weed: S3Server) -> None:
    settings, count = weed.settings(), 4
    store = settings.open_store()
    store.put(keys(0, 2 * count), values(0, 2 * count))
    removers = [settings.open_store() for _ in range(count)]
    answers: dict[int, list[bool]] = {}
    begin = threading.Barrier(count)

    def remove(at: int) -> None:
        begin.wait()
        answers[at] = removers[at].remove(keys(at, 1))

    threads = [threading.Thread(target=remove, args=[at]) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [value is not None for value in store.get(keys(0, 2 * count), HEAD_BYTES + 50)]
    assert left == [not answers[at][0] for at in range(count)] + [True] * count, "what is said to be gone is gone"
    assert sum(answer[0] for answer in answers.values()) >= 1


def test_several_write_at_once(settings: S3Settings) -> None:
    stores = [settings.open_store() for _ in range(4)]

    def write(at: int) -> None:
        for turn in range(5):
            first = 100 * at + 10 * turn
            assert all(stores[at].put(keys(first, 10), values(first, 10)))

    threads = [threading.Thread(target=write, args=[at]) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in (*stores, settings.open_store()):
        assert all(all(there(one, 100 * at, 50)) for at in range(4))
    assert len(paths_of(settings, "/index-")) == 4
