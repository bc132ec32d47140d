"""Real stores that several servers have below them, of each kind, as a test of servers needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.server.tiering.settings import TierPlace, TierPlan, TierSettings
from kvoffload.tiers.envelope import HEAD_BYTES
from kvoffload.tiers.s3 import S3Settings
from kvoffload.tiers.valkey import ValkeySettings
from tests.kit.tiers import s3_server, valkey_server


@dataclass(frozen=True, kw_only=True)
class SharedStore:
    kind: str
    place: TierPlace
    nowhere: TierPlace
    """Where none is."""
    flush: Callable[[], object]
    count: Callable[[], int]
    """Records."""

    def below(self, **settings: Any) -> TierPlan:
        return TierPlan(place=self.place, settings=TierSettings(name=self.kind, **settings))


@contextmanager
def share_valkey(folder: Path) -> Iterator[SharedStore]:
    with valkey_server.serve(folder, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        address = ValkeyAddress(host="127.0.0.1", port=server.port)
        yield SharedStore(
            kind="valkey",
            place=ValkeySettings(address=address, call_timeout_s=valkey_server.WAIT_S, connections=2),
            nowhere=ValkeySettings(address=replace(address, port=1)),
            flush=lambda: valkey_server.ask(server, "flushall"),
            count=lambda: int(valkey_server.ask(server, "dbsize")),
        )


@contextmanager
def share_s3(folder: Path) -> Iterator[SharedStore]:
    with s3_server.serve_weed(folder) as server:
        settings = server.settings()
        yield SharedStore(
            kind="s3",
            place=settings,
            nowhere=replace(settings, endpoint="http://127.0.0.1:1"),
            flush=lambda: empty_bucket(settings),
            count=lambda: count_records(settings),
        )


SHARED = {"valkey": share_valkey, "s3": share_s3}


def empty_bucket(settings: S3Settings) -> None:
    import obstore

    bucket = s3_server.client(settings)
    for page in obstore.list(bucket):
        obstore.delete(bucket, [one["path"] for one in page])


def count_records(settings: S3Settings) -> int:
    def count() -> int:
        names = set()
        with contextlib.closing(settings.open_store()) as store:
            cursor, heads = store.scan(0, HEAD_BYTES)
            while True:
                names |= set(heads)
                if not cursor:
                    return len(names)
                cursor, heads = store.scan(cursor, HEAD_BYTES)

    # A store has a loop of its own, and a test may be in one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(count).result()
