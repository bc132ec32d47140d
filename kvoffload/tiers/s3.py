"""A bucket of an S3-compatible object store as a record store.

Large records are objects of their own. Small ones lie behind each other in packs, and index objects say where. How long
either stays is the bucket's business: its lifecycle removes them, and a record that is gone is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from kvoffload.config.s3_address import parse_s3_address
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_private_text
from kvoffload.s3_keys import S3Keys, parse_s3_keys
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import Key, StoreFacts, Value
from kvoffload.tiers.remote import RemotePlace, RemoteTier, RemoteTierSettings
from kvoffload.tiers.s3_bucket import Ranges, S3Access
from kvoffload.tiers.s3_client import S3Client
from kvoffload.tiers.s3_index import READ_BYTES, PackIndex, PackPlace, SectionKind, read_sections
from kvoffload.tiers.s3_packs import S3Packs, SmallRecord, is_blank, pack_path
from kvoffload.types import HASH_BYTES
from kvoffload.units import KIB

if TYPE_CHECKING:
    from kvoffload.config.settings import Settings

LAYOUT: Final = "1"
"""The first part of every path."""
WHOLE_BYTES: Final = 256 * KIB
"""A value of at least so many bytes is an object of its own."""

_SPACE_BYTES = HASH_BYTES + 8
"""Length of the part of a key that names its space: fingerprint, group, shard."""
_SCANNED = 64

Rows = list[int]
"""Places in a list of keys."""


@dataclass(frozen=True, kw_only=True)
class S3Settings(S3Access, RemotePlace):
    """The settings with which a tier reaches a bucket."""

    connections: int = 4
    compress: Coding = Coding.OFF

    @classmethod
    def from_settings(cls, settings: Settings, where: str) -> Self:
        """Makes the settings for this bucket. ConfigError: a file cannot be read."""
        return cls(
            address=parse_s3_address(where),
            endpoint=settings.s3_endpoint,
            region=settings.s3_region,
            keys=_read_s3_keys(settings.s3_credentials_file),
            ca_certificates=_read_certificates(settings.s3_ca_file),
            call_timeout_s=settings.remote_timeout,
            connections=settings.remote_connections,
            compress=Coding(settings.remote_compress),
        )

    def describe(self) -> str:
        """Describes the bucket in a few words."""
        return f"{self.address} at {self.endpoint}" if self.endpoint else str(self.address)

    def open_tier(self) -> RemoteTier:
        """Opens the tier and starts its threads; the store need not be there."""
        open_store = partial(self.open_store, PackIndex())
        return RemoteTier(
            RemoteTierSettings(
                place=self.describe(),
                open_store=open_store,
                connections=self.connections,
                # The start of their processes takes longer than a request does.
                opens_alone=True,
                coder=RecordCoder(self.compress),
            )
        )

    def find_remedy(self, reason: str) -> str:
        return f"curl -I {self.endpoint or 'https://s3.amazonaws.com'}/{self.address.bucket}"

    def open_store(self, index: PackIndex | None = None) -> S3Store:
        """Opens a store. StoreFaultError: it cannot be had. `index`: shared by the connections of one tier."""
        return S3Store(S3Client(self), PackIndex() if index is None else index)


def _read_s3_keys(file: str) -> S3Keys | None:
    if not file:
        return None
    try:
        return parse_s3_keys(read_private_text(Path(file)))
    except ValueError as fault:
        raise ConfigError(
            f"setting 's3_credentials_file' = {file!r}: {fault}",
            remedy="give a file with a section [default], aws_access_key_id and aws_secret_access_key",
        ) from None


def _read_certificates(file: str) -> str:
    if not file:
        return ""
    try:
        text = Path(file).read_text("ascii", "replace")
    except OSError as fault:
        text = f"{fault.strerror}"
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ConfigError(
            f"setting 's3_ca_file' = {file!r} is no certificate that can be read",
            remedy="give a file of certificates in PEM",
        )
    return text


class S3Store:
    """A RecordStore in a bucket."""

    def __init__(self, bucket: S3Client, index: PackIndex) -> None:
        self._bucket = bucket
        self._index = index
        self._packs = S3Packs(bucket, index)

    def probe(self) -> StoreFacts:
        """Checks that the store answers this user. It reports no figures of itself."""
        self._bucket.list_level(f"{LAYOUT}/probe")
        return StoreFacts()

    def close(self) -> None:
        self._bucket.close()

    # ---- where a record is ----

    def _search(
        self,
        keys: Sequence[Key],
        ask_packs: Callable[[str, Rows], Rows],
        ask_whole: Callable[[str, Rows], Rows],
    ) -> None:
        """Searches packs and whole objects. Each callable returns the rows it has not found. A record that is not where
        the index has it may have come elsewhere since, so the index is refreshed before a second try."""
        for space, rows in _by_space(keys):
            left = ask_packs(space, rows)
            has_asked = bool(left) and self._index.has_whole(space)
            if has_asked:
                left = ask_whole(space, left)
            if left:
                self._refresh(space)
                left = ask_packs(space, left)
            if left and not has_asked and self._index.has_whole(space):
                ask_whole(space, left)

    def _refresh(self, space: str) -> None:
        """Learns what others have written: lists the space once, and reads the new parts of index objects."""
        level = self._bucket.list_level(space)
        self._index.note_whole(space, "record" in level.folders)
        parts = self._index.plan(space, level.objects)
        wanted = [Ranges(path=part.path, starts=[part.start], sizes=[part.end - part.start]) for part in parts]
        for part, found in zip(parts, self._bucket.get_ranges(wanted), strict=True):
            if found is not None:
                self._index.learn(space, part, found[0])

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        """Returns what is there. A look makes nothing live longer."""
        self._bucket.begin()
        there = [False] * len(keys)

        def ask_packs(space: str, rows: Rows) -> Rows:
            places = self._index.find(space, [_hash_of(keys[row]) for row in rows])
            packs = sorted({place.pack for some in places for place in some})
            is_there = dict(zip(packs, self._bucket.has([pack_path(space, pack) for pack in packs]), strict=True))
            for pack in packs:
                if not is_there[pack]:
                    self._index.forget_pack(space, pack)
            for row, some in zip(rows, places, strict=True):
                there[row] = any(is_there[place.pack] for place in some)
            return [row for row in rows if not there[row]]

        def ask_whole(space: str, rows: Rows) -> Rows:
            for row, is_there in zip(rows, self._bucket.has(_whole_paths(keys, rows)), strict=True):
                there[row] = is_there
            return [row for row in rows if not there[row]]

        self._search(keys, ask_packs, ask_whole)
        return there

    def get(self, keys: Sequence[Key], limit_bytes: int) -> list[memoryview | None]:
        self._bucket.begin()
        values: list[memoryview | None] = [None] * len(keys)

        def ask_packs(space: str, rows: Rows) -> Rows:
            places = dict(zip(rows, self._index.find(space, [_hash_of(keys[row]) for row in rows]), strict=True))
            while any(places.values()):
                asked = {row: some.pop(0) for row, some in places.items() if some}
                for row, value in (self._read(space, asked, limit_bytes)).items():
                    values[row] = value
                    del places[row]
            return list(places)

        def ask_whole(space: str, rows: Rows) -> Rows:
            for row, value in zip(rows, self._bucket.get(_whole_paths(keys, rows), limit_bytes), strict=True):
                values[row] = value
            return [row for row in rows if values[row] is None]

        self._search(keys, ask_packs, ask_whole)
        return values

    def _read(self, space: str, places: dict[int, PackPlace], limit_bytes: int) -> dict[int, memoryview]:
        """Reads records from packs, by one request where they lie together. Leaves out those that are gone."""
        by_pack: dict[bytes, Rows] = {}
        for row, place in places.items():
            by_pack.setdefault(place.pack, []).append(row)
        wanted = [
            Ranges(
                path=pack_path(space, pack),
                starts=[places[row].offset for row in rows],
                sizes=[min(places[row].size_bytes, limit_bytes) for row in rows],
            )
            for pack, rows in by_pack.items()
        ]
        values = {}
        for (pack, rows), found in zip(by_pack.items(), self._bucket.get_ranges(wanted), strict=True):
            if found is None:
                self._index.forget_pack(space, pack)
                continue
            for row, value in zip(rows, found, strict=True):
                if is_blank(value):
                    self._index.forget_record(space, places[row])
                else:
                    values[row] = value
        return values

    # ---- changes ----

    def put(self, keys: Sequence[Key], values: Sequence[Sequence[Value]]) -> list[bool]:
        self._bucket.begin()
        taken = [False] * len(keys)
        for space, rows in _by_space(keys):
            sizes = {row: sum(map(len, values[row])) for row in rows}
            whole = [row for row in rows if sizes[row] >= WHOLE_BYTES]
            small = [row for row in rows if sizes[row] < WHOLE_BYTES]
            packs = self._packs.lay_out(
                [SmallRecord(block_hash=_hash_of(keys[row]), parts=values[row], size_bytes=sizes[row]) for row in small]
            )
            objects = list(zip(_whole_paths(keys, whole), [values[row] for row in whole], strict=True))
            objects += [(pack_path(space, section.pack), parts) for section, parts in packs]
            answers = iter(self._bucket.put_new(objects))
            for row in whole:
                taken[row] = next(answers)
            if whole:
                self._index.note_whole(space, True)
            there = [section for (section, _), is_taken in zip(packs, answers, strict=True) if is_taken]
            if there and self._packs.publish(space, there):
                in_packs = {record.block_hash for section in there for record in section.records}
                for row in small:
                    taken[row] = _hash_of(keys[row]) in in_packs
        return taken

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        self._bucket.begin()
        gone = [False] * len(keys)
        for space, rows in _by_space(keys):
            self._refresh(space)
            if self._index.has_whole(space):
                paths = _whole_paths(keys, rows)
                there = [at for at, is_there in enumerate(self._bucket.has(paths)) if is_there]
                for at, is_gone in zip(there, self._bucket.delete([paths[at] for at in there]), strict=True):
                    gone[rows[at]] = is_gone
            by_pack: dict[bytes, dict[PackPlace, int]] = {}
            for row, places in zip(rows, self._index.find(space, [_hash_of(keys[row]) for row in rows]), strict=True):
                for place in places:
                    by_pack.setdefault(place.pack, {})[place] = row
            for pack, in_pack in by_pack.items():
                hashes = {place: _hash_of(keys[row]) for place, row in in_pack.items()}
                for place in self._packs.blank(space, pack, hashes):
                    gone[in_pack[place]] = True
        return gone

    # ---- all of it ----

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        """Scans some objects. The cursor is the last path as a number."""
        self._bucket.begin()
        after = cursor.to_bytes((cursor.bit_length() + 7) // 8, "big").decode()
        page = self._bucket.list_after(LAYOUT, after, _SCANNED)
        whole = [path for path, _ in page if "/record/" in path]
        heads = [bytes(head) for head in self._bucket.get_head(whole, head_bytes) if head is not None]
        for path, size_bytes in page:
            if "/index-" not in path or size_bytes > READ_BYTES:
                continue
            # One after the other, so that the listed sizes take no memory together.
            self._bucket.begin()
            [found] = self._bucket.get_ranges([Ranges(path=path, starts=[0], sizes=[size_bytes])])
            sections = [] if found is None else read_sections(found[0])
            wanted = [
                Ranges(
                    path=pack_path(path.rpartition("/")[0], section.pack),
                    starts=[record.offset for record in section.records],
                    sizes=[min(record.size_bytes, head_bytes) for record in section.records],
                )
                for section in sections
                if section.kind is SectionKind.PACKED
            ]
            heads += [bytes(head) for some in self._bucket.get_ranges(wanted) for head in some or []]
        told = [head for head in heads if head and not is_blank(memoryview(head))]
        return (int.from_bytes(page[-1][0].encode(), "big") if page else 0), told


def _by_space(keys: Sequence[Key]) -> Iterator[tuple[str, Rows]]:
    """Yields the rows of keys with one beginning, and the path of their space."""
    spaces: dict[bytes, Rows] = {}
    for row, key in enumerate(keys):
        spaces.setdefault(key[:_SPACE_BYTES], []).append(row)
    for begin, rows in spaces.items():
        yield _space_path(begin), rows


def _space_path(key: Key) -> str:
    return f"{LAYOUT}/{key[:HASH_BYTES].hex()}/{key[HASH_BYTES:_SPACE_BYTES].hex()}"


def _hash_of(key: Key) -> bytes:
    return key[_SPACE_BYTES:]


def _whole_paths(keys: Sequence[Key], rows: Rows) -> list[str]:
    return [f"{_space_path(keys[row])}/record/{_hash_of(keys[row]).hex()}" for row in rows]
