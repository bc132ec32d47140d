"""A bucket as the library asks it: many requests at once, each with the same deadline, and no other. For a process that
the library may end: S3Client is for others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

from kvoffload.config.s3_address import S3Address
from kvoffload.s3_keys import S3Keys
from kvoffload.tiers.record_store import StoreFaultError, Value, one_line
from kvoffload.tiers.s3_index import ListedIndex
from kvoffload.units import MIB

REQUESTS: Final = 16
"""The most requests under way at once, for one connection."""
PART_BYTES: Final = 8 * MIB
"""Bytes of a large object that one request moves."""
GAP_BYTES: Final = 256 << 10
"""The largest gap between two ranges that is read along, rather than sending two requests."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>(?:\s*<Message>([^<]{0,200})</Message>)?")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_CONNECTING = re.compile(r"kind: (Timeout|Connect)\b")
_SYSTEM = re.compile(r'message: "([^"]{1,100})"')
_REFUSED = (403, 413, 507)
"""Statuses of a request for one object: no right to write, too large, no room."""
_SHARES = (0.75, 0.2, 0.05)
"""Shares of the deadline: for one try; for the time in which a second one may begin; for the pause before it."""
_PAUSE_S = 0.1

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class S3Access:
    """How a connection reaches the bucket."""

    address: S3Address
    endpoint: str = ""
    """URL of the store; empty for the one of the region."""
    region: str = ""
    keys: S3Keys | None = None
    """The keys to use, or None for those of the environment or the machine."""
    ca_certificates: str = field(default="", repr=False)
    """Certificates in PEM that are trusted in addition to those of the library."""
    call_timeout_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Ranges of one object."""

    path: str
    starts: Sequence[int]
    sizes: Sequence[int]


@dataclass(kw_only=True)
class Span:
    """Ranges of one object that are read by one request, by their numbers."""

    start: int
    end: int
    numbers: list[int]


def join_ranges(wanted: Ranges) -> list[Span]:
    """Joins ranges that are less than GAP_BYTES apart, to spans of PART_BYTES or a little more."""
    spans: list[Span] = []
    for number in sorted(range(len(wanted.starts)), key=wanted.starts.__getitem__):
        start, size = wanted.starts[number], wanted.sizes[number]
        last = spans[-1] if spans else None
        if last is not None and start - last.end < GAP_BYTES and last.end - last.start < PART_BYTES:
            last.end = max(last.end, start + size)
            last.numbers.append(number)
        elif size:
            spans.append(Span(start=start, end=start + size, numbers=[number]))
    return spans


@dataclass(frozen=True, kw_only=True)
class Level:
    """The objects and folders at one level of a bucket."""

    objects: list[ListedIndex]
    folders: set[str]


class S3Bucket:
    """A bucket as used by one thread. Its calls raise StoreFaultError where the store cannot be asked now."""

    def __init__(self, settings: S3Access) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError
            from obstore.store import S3Store
        except ImportError:
            raise StoreFaultError("obstore is not installed: pip install obstore") from None
        self._library: Any = obstore
        self._errors = (BaseError, OSError, ValueError)
        self._exists = (AlreadyExistsError, PreconditionError)
        self._denied = PermissionDeniedError
        try:
            self._client: Any = S3Store(**_options(settings))
        except self._errors as fault:
            raise StoreFaultError(explain_fault(fault)) from fault

    # ---- questions ----

    async def has(self, paths: Sequence[str]) -> list[bool]:
        async def ask(path: str) -> bool:
            try:
                await self._library.head_async(self._client, path)
            except FileNotFoundError:
                return False
            return True

        return await self._each(ask, paths)

    async def get(
        self, paths: Sequence[str], limit_bytes: int, take: Callable[[int, memoryview], Answer]
    ) -> list[Answer | None]:
        """Reads objects; of a longer one its beginning. `take` gets each object's number and data as soon as they have
        come, while they are in the processor's caches; its answers are returned, None for an object that is not
        there."""

        async def ask(one: tuple[int, str]) -> Answer | None:
            number, path = one
            data = await self._get_beginning(path, limit_bytes)
            return None if data is None else take(number, data)

        return await self._each(ask, list(enumerate(paths)))

    async def get_head(self, paths: Sequence[str], size_bytes: int) -> list[memoryview | None]:
        """Reads the first bytes of objects."""
        wanted = [Ranges(path=path, starts=[0], sizes=[size_bytes]) for path in paths]
        return [None if found is None else found[0] for found in await self.get_ranges(wanted)]

    async def get_ranges(self, wanted: Sequence[Ranges]) -> list[list[memoryview] | None]:
        """Reads ranges of objects. None where the object is gone; less where it is shorter. Ranges that lie together
        come by one request."""
        spans = [(at, span) for at, one in enumerate(wanted) for span in join_ranges(one)]

        async def ask(one: tuple[int, Span]) -> memoryview | None:
            at, span = one
            return await self._get_range(wanted[at].path, span.start, span.end - span.start)

        found: list[list[memoryview] | None] = [[memoryview(b"")] * len(one.starts) for one in wanted]
        for (at, span), data in zip(spans, await self._each(ask, spans), strict=True):
            parts = found[at]
            if data is None or parts is None:
                found[at] = None
                continue
            for number in span.numbers:
                start = wanted[at].starts[number] - span.start
                parts[number] = data[start : start + wanted[at].sizes[number]]
        return found

    async def get_version(self, path: str, limit_bytes: int) -> tuple[bytearray, str] | None:
        """Returns all of an object, and its version. None: it is gone, or longer than `limit_bytes`."""
        try:
            found = await self._library.get_async(self._client, path)
            if found.meta["size"] > limit_bytes:
                return None
            return bytearray(memoryview(await found.bytes_async())), found.meta["e_tag"] or ""
        except FileNotFoundError:
            return None
        except self._errors as fault:
            raise StoreFaultError(explain_fault(fault)) from fault

    async def list_level(self, path: str) -> Level:
        try:
            found = await self._library.list_with_delimiter_async(self._client, path)
        except self._errors as fault:
            raise StoreFaultError(explain_fault(fault)) from fault
        objects = [
            ListedIndex(path=one["path"], size_bytes=one["size"], changed=one["last_modified"])
            for one in found["objects"]
        ]
        return Level(
            objects=objects, folders={folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"]}
        )

    async def list_after(self, path: str, after: str, limit: int) -> list[tuple[str, int]]:
        """Returns up to `limit` objects at all levels of the path that come after `after`, with their sizes."""
        pages = self._library.list(self._client, path, offset=after or None, chunk_size=limit)
        try:
            async for page in pages:
                return [(one["path"], one["size"]) for one in page]
        except self._errors as fault:
            raise StoreFaultError(explain_fault(fault)) from fault
        return []

    # ---- changes ----

    async def put_new(self, objects: Sequence[tuple[str, Sequence[Value]]]) -> list[bool]:
        """Puts objects. One that is there stays as it is, and counts as put. False: it is refused."""

        async def ask(one: tuple[str, Sequence[Value]]) -> bool:
            path, parts = one
            if sum(map(len, parts)) > 2 * PART_BYTES:
                # A put in parts cannot be made conditional; and under one name there is only one content.
                return await self._try(
                    self._library.put_async(self._client, path, parts, use_multipart=True, chunk_size=PART_BYTES)
                )
            return await self._try(
                self._library.put_async(self._client, path, parts, mode="create", use_multipart=False)
            )

        return await self._each(ask, objects)

    async def put_version(self, path: str, data: Value, e_tag: str) -> str | None:
        """Replaces the version `e_tag` of an object, or creates it if that is empty, and returns the new version. None:
        the object has another version by now, or the put is refused."""
        mode: Any = {"e_tag": e_tag} if e_tag else "create"
        try:
            put = await self._library.put_async(self._client, path, [data], mode=mode, use_multipart=False)
        except (*self._exists, self._denied, FileNotFoundError):
            return None
        except self._errors as fault:
            if _status_of(fault) in (*_REFUSED, 404, 409):
                return None
            raise StoreFaultError(explain_fault(fault)) from fault
        return str(put["e_tag"] or "")

    async def delete(self, paths: Sequence[str]) -> list[bool]:
        """Deletes objects. False: it is refused. An object that was not there counts as deleted."""

        async def ask(path: str) -> bool:
            return await self._try(self._library.delete_async(self._client, path))

        return await self._each(ask, paths)

    # ---- inside ----

    async def _get_beginning(self, path: str, limit_bytes: int) -> memoryview | None:
        part = (0, min(PART_BYTES, limit_bytes))
        try:
            first = await self._library.get_async(self._client, path, options={"range": part})
            data = memoryview(await first.bytes_async())
        except FileNotFoundError:
            return None
        except self._errors as fault:
            if _status_of(fault) == 416:
                return memoryview(b"")
            raise
        end = min(first.meta["size"], limit_bytes)
        starts = range(PART_BYTES, end, PART_BYTES)
        if not starts:
            return data
        rest = await asyncio.gather(*(self._get_range(path, start, min(PART_BYTES, end - start)) for start in starts))
        return memoryview(b"".join([data, *(part for part in rest if part is not None)]))

    async def _get_range(self, path: str, start: int, size: int) -> memoryview | None:
        try:
            return memoryview(await self._library.get_range_async(self._client, path, start=start, length=size))
        except FileNotFoundError:
            return None
        except self._errors as fault:
            if _status_of(fault) == 416:
                return memoryview(b"")
            raise

    async def _try(self, request: Awaitable[Any]) -> bool:
        try:
            await request
        except (*self._exists, FileNotFoundError):
            return True
        except self._denied:
            return False
        except self._errors as fault:
            if _status_of(fault) in _REFUSED:
                return False
            raise
        return True

    async def _each(self, ask: Callable[[Item], Awaitable[Answer]], items: Sequence[Item]) -> list[Answer]:
        """Calls `ask` for each item, up to REQUESTS at once. When one finds the store gone, those that wait for their
        turn end, so that they cost no further deadline."""
        gate = asyncio.Semaphore(REQUESTS)
        faults: list[Exception] = []

        async def one(item: Item) -> Answer | None:
            async with gate:
                if not faults:
                    try:
                        return await ask(item)
                    except self._errors as fault:
                        faults.append(fault)
                return None

        answers = await asyncio.gather(*map(one, items))
        if faults:
            raise StoreFaultError(explain_fault(faults[0])) from faults[0]
        return answers  # type: ignore[return-value]


def _options(settings: S3Access) -> dict[str, Any]:
    one_try_s, retry_s, pause_s = (share * settings.call_timeout_s for share in _SHARES)
    pause_s = min(pause_s, _PAUSE_S)
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=one_try_s),
        "connect_timeout": timedelta(seconds=one_try_s),
        "allow_http": settings.endpoint.startswith("http://"),
        "pool_max_idle_per_host": str(REQUESTS),
    }
    if settings.ca_certificates:
        client["root_certificate"] = settings.ca_certificates
    options: dict[str, Any] = {
        "bucket": settings.address.bucket,
        "prefix": settings.address.prefix or None,
        "client_options": client,
        # One more try where an answer came at once, as busy stores want it; none where a deadline has passed.
        "retry_config": {
            "max_retries": 1,
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": {
                "init_backoff": timedelta(seconds=pause_s),
                "max_backoff": timedelta(seconds=pause_s),
                "base": 2,
            },
        },
    }
    if settings.endpoint:
        options["endpoint"] = settings.endpoint
    if settings.region:
        options["region"] = settings.region
    if settings.keys is not None:
        options |= {"access_key_id": settings.keys.key_id, "secret_access_key": settings.keys.secret}
        if settings.keys.session_token:
            options["session_token"] = settings.keys.session_token
    return options


def _status_of(fault: BaseException) -> int:
    """Returns the answer's status; 0 without one."""
    found = _STATUS.search(str(fault))
    return int(found[1]) if found else 0


def explain_fault(fault: BaseException) -> str:
    """Explains a fault in one line, without what the library tells its developers."""
    text = str(fault)
    status = _status_of(fault)
    if code := _CODE.search(text):
        return one_line(f"{status} {code[1]}: {code[2] or ''}").rstrip(":")
    if status:
        return f"it answers with status {status}"
    if certificate := _CERTIFICATE.search(text):
        return f"its certificate is not trusted: {certificate[1]}"
    if kind := _CONNECTING.search(text):
        system = _SYSTEM.search(text)
        return (
            one_line(system[1]) if system else ("it takes too long" if kind[1] == "Timeout" else "it cannot be reached")
        )
    return one_line(text.partition("Debug source")[0]) or type(fault).__name__
