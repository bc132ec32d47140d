"""Values in a store that others write to: values in their envelopes, index objects, packs; with right checksums around
anything, too. And what a store says of itself when it refuses."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from kvoffload import native
from kvoffload.tiers import s3_bucket
from kvoffload.tiers.envelope import (
    HEAD_BYTES,
    OpenValue,
    RecordHead,
    RecordName,
    check_record,
    digest_of,
    open_value,
    pack_value,
    read_head,
    read_key,
)
from kvoffload.tiers.s3 import S3Store
from kvoffload.tiers.s3_bucket import Level, Ranges
from kvoffload.tiers.s3_index import ListedIndex, PackedRecord, PackIndex, Section, SectionKind, read_sections
from tests.fuzz.parts import Input, pack_part

_NAME = RecordName(b"f" * 32, 1, 0, b"h" * 32)
_OTHER = RecordName(b"f" * 32, 1, 0, b"i" * 32)
_SPACE = f"1/{_NAME.key[:32].hex()}/{_NAME.key[32:40].hex()}"
_KEYS = native.SealKeys([bytes(32)])
_CHECKSUM = struct.Struct("<Q")
_PACK = b"p" * 16
_KINDS = 4
_MOST_BYTES = 1 << 16


class _Bucket:
    """Objects that no other client writes."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def begin(self) -> None: ...

    def close(self) -> None: ...

    def has(self, paths: Sequence[str]) -> list[bool]:
        return [path in self.objects for path in paths]

    def get(self, paths: Sequence[str], limit_bytes: int) -> list[memoryview | None]:
        return [memoryview(self.objects[path])[:limit_bytes] if path in self.objects else None for path in paths]

    def get_head(self, paths: Sequence[str], size_bytes: int) -> list[memoryview | None]:
        return self.get(paths, size_bytes)

    def get_ranges(self, wanted: Sequence[Ranges]) -> list[list[memoryview] | None]:
        return [
            [
                memoryview(self.objects[one.path])[start : start + size]
                for start, size in zip(one.starts, one.sizes, strict=True)
            ]
            if one.path in self.objects
            else None
            for one in wanted
        ]

    def get_version(self, path: str, limit_bytes: int) -> tuple[bytearray, str] | None:
        found = self.objects.get(path)
        return None if found is None or len(found) > limit_bytes else (bytearray(found), "1")

    def put_version(self, path: str, data: bytes, _: str) -> str:
        self.objects[path] = bytes(data)
        return "1"

    def delete(self, paths: Sequence[str]) -> list[bool]:
        return [self.objects.pop(path, None) is not None for path in paths]

    def list_level(self, path: str) -> Level:
        changed = datetime.fromtimestamp(0, UTC)
        objects = [
            ListedIndex(path=one, size_bytes=len(data), changed=changed)
            for one, data in self.objects.items()
            if one.startswith(f"{path}/index-")
        ]
        return Level(objects=objects, folders={one[len(path) + 1 :].partition("/")[0] for one in self.objects})

    def list_after(self, _: str, after: str, limit: int) -> list[tuple[str, int]]:
        return [(path, len(self.objects[path])) for path in sorted(self.objects) if path > after][:limit]


def make_seeds() -> Iterator[bytes]:
    data = bytes(range(50))
    value = RecordHead(_NAME, len(data), digest_of(memoryview(data), _NAME), b"p" * 32).pack() + data
    record = bytes(at % 7 for at in range(1000))
    coded = native.RecordEncoder().encode(record) or b""
    head = RecordHead(_NAME, len(record), digest_of(memoryview(record), _NAME), b"p" * 32, len(coded)).pack()
    digest = digest_of(memoryview(data), _NAME)
    sealed = b"".join(map(bytes, pack_value(_NAME, data, digest, b"p" * 32, coded=None, keys=_KEYS)))
    for one in (value, head + coded, sealed):
        yield b"\0" + one
        yield b"\1" + one[: HEAD_BYTES - 8] + one[HEAD_BYTES:]
    for kind in SectionKind:
        records = [
            PackedRecord(block_hash=_NAME.block_hash, offset=0, size_bytes=len(value)),
            PackedRecord(block_hash=_OTHER.block_hash, offset=len(value), size_bytes=20),
        ]
        written = Section(kind=kind, pack=_PACK, records=records).write()
        yield b"\2" + b"\0" + pack_part(written) + pack_part(value + bytes(20)) + pack_part(value)
        body = written[:-8]
        yield b"\2" + b"\1" + pack_part(body) + pack_part(body) + pack_part(value) + pack_part(b"")
    yield b"\3" + b"GenericError { status code: 503, <Code>SlowDown</Code> <Message>Not\nso fast</Message> }"
    yield b"\3" + b'kind: Connect, message: "Connection refused" Debug source: InvalidCertificate( Expired )'


def run(data: bytes) -> None:
    given = Input(data)
    match given.number() % _KINDS:
        case 0:
            _open(given.rest())
        case 1:
            fields = given.take(HEAD_BYTES - 8)
            _open(fields + _CHECKSUM.pack(native.digest_run(fields)) + given.rest())
        case 2:
            _find(given)
        case _:
            assert "\n" not in s3_bucket.explain_fault(ValueError(given.rest().decode(errors="replace")))


def _open(value: bytes) -> None:
    head = read_head(value)
    record = memoryview(value)[HEAD_BYTES:]
    said = head.record_bytes if isinstance(head, RecordHead) else 0
    for name in (_NAME, head.name if isinstance(head, RecordHead) else _OTHER):
        # As a reader who expects so many, and one who believes what is said.
        for record_bytes in (len(record), min(said, _MOST_BYTES)):
            for keys in (None, _KEYS):
                opened = open_value(memoryview(value), name, record_bytes, keys=keys)
                if not isinstance(opened, OpenValue):
                    continue
                assert len(opened.record) == record_bytes
                assert opened.head.digest == digest_of(opened.record, name)
                assert read_key(opened.head.name.key) == name
        checked = check_record(value[:HEAD_BYTES], record, name)
        assert not isinstance(checked, RecordHead) or checked.digest == digest_of(record, name)


def _find(given: Input) -> None:
    """A bucket with these objects, asked for records in every way."""
    is_sealed = given.number() % 2 == 1
    index = b""
    for _ in range(2 if is_sealed else 1):
        part = given.part()
        index += part + _CHECKSUM.pack(native.digest_run(part)) if is_sealed and part else part
    sections = read_sections(index)
    packs = {section.pack for section in sections} or {_PACK}
    pack, whole = given.part(), given.part()
    objects = {f"{_SPACE}/pack/{one.hex()}": pack for one in packs} | {f"{_SPACE}/index-0": index}
    if whole:
        objects[f"{_SPACE}/record/{_OTHER.block_hash.hex()}"] = whole
    store = S3Store(_Bucket(objects), PackIndex(limit=100))  # type: ignore[arg-type]
    try:
        keys = [_NAME.key, _OTHER.key]
        assert len(store.look(keys)) == len(store.get(keys, 200)) == len(keys)
        store.scan(0, HEAD_BYTES)
        store.remove(keys)
        for name, value in zip((_NAME, _OTHER), store.get(keys, 200), strict=True):
            assert value is None or not isinstance(open_value(value, name, len(value) - HEAD_BYTES), OpenValue)
    finally:
        store.close()
