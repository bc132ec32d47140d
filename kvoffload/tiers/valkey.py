"""Valkey, or Redis, as a record store: one server or a cluster, which says itself what it is.

Records are values of their own, with a time to live where one is set; what the server evicts when it is full is its own
policy's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvoffload.tiers.record_store import Key, StoreFacts, StoreFaultError, Value
from kvoffload.tiers.remote import RemoteTier, RemoteTierTerms
from kvoffload.valkey_address import ValkeyAddress

if TYPE_CHECKING:
    import redis

PREFIX = b"kvoffload:1:"
"""Of every key; the number is that of the envelope's layout."""
_SCANNED = 256
_NODES = 1 << 10
"""Of a cluster, at most: a scan's cursor says which one it is at."""


@dataclass(frozen=True, kw_only=True)
class ValkeyTerms:
    """How it is reached."""

    address: ValkeyAddress
    password: str = field(default="", repr=False)
    ca_file: str = ""
    """Whose certificates are trusted; empty for those that the machine trusts."""
    cert_file: str = ""
    key_file: str = ""
    """What this client shows, where the server asks for it."""
    call_timeout_s: float = 1.0
    connections: int = 4
    ttl_s: int = 0
    """0: records stay until the server evicts them."""

    def describe(self) -> str:
        """In a few words."""
        return str(self.address)

    def open_tier(self) -> RemoteTier:
        """Starts its threads; the server need not be there."""
        return RemoteTier(
            RemoteTierTerms(place=str(self.address), open_store=self.open_store, connections=self.connections)
        )

    def open_store(self) -> ValkeyStore:
        """Connects. StoreFaultError."""
        return ValkeyStore(self)


class ValkeyStore:
    """A RecordStore."""

    def __init__(self, terms: ValkeyTerms) -> None:
        try:
            import redis
        except ImportError:
            raise StoreFaultError("redis-py is not installed: pip install 'kvoffload[valkey]'") from None
        self._terms = terms
        self._errors = redis.exceptions
        self._client: Any = None
        with self._faults():
            single = redis.Redis(**self._options(redis))
            self._client = single
            if single.info("cluster").get("cluster_enabled"):
                options = self._options(redis)
                del options["db"]
                single.close()
                self._client = redis.RedisCluster(**options)
        self._is_cluster = self._client is not single

    def put(self, keys: Sequence[Key], values: Sequence[Sequence[Value]]) -> list[bool]:
        ttl_s = self._terms.ttl_s or None
        with self._faults(), self._pipeline() as calls:
            for key, parts in zip(keys, values, strict=True):
                calls.set(PREFIX + key, b"".join(parts), ex=ttl_s)
            return [self._is_taken(answer) for answer in calls.execute(raise_on_error=False)]

    def get(self, keys: Sequence[Key]) -> list[memoryview | None]:
        with self._faults():
            if self._is_cluster:
                answers = self._ask_each("GET", keys)
            else:
                answers = self._client.mget([PREFIX + key for key in keys]) if keys else []
            return [None if value is None else memoryview(value) for value in answers]

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        with self._faults():
            if is_use and self._terms.ttl_s:
                return list(map(bool, self._ask_each("EXPIRE", keys, self._terms.ttl_s)))
            return list(map(bool, self._ask_each("TOUCH" if is_use else "EXISTS", keys)))

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        with self._faults():
            return list(map(bool, self._ask_each("UNLINK", keys)))

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        with self._faults():
            nodes = self._nodes()
            at, node = divmod(cursor, _NODES)
            if node >= len(nodes):
                return 0, []
            following, keys = nodes[node].scan(at, match=PREFIX + b"*", count=_SCANNED)
            heads = []
            if keys:
                with nodes[node].pipeline(transaction=False) as calls:
                    for key in keys:
                        calls.getrange(key, 0, head_bytes - 1)
                    heads = [head for head in calls.execute(raise_on_error=False) if isinstance(head, bytes) and head]
            if following:
                return int(following) * _NODES + node, heads
            return (node + 1 if node + 1 < len(nodes) else 0), heads

    def probe(self) -> StoreFacts:
        with self._faults():
            facts = [(node.info("memory"), node.dbsize()) for node in self._nodes()]
            capacities = [int(memory.get("maxmemory", 0)) for memory, _ in facts]
            return StoreFacts(
                capacity_bytes=sum(capacities) if all(capacities) else 0,
                used_bytes=sum(int(memory["used_memory"]) for memory, _ in facts),
                values=sum(int(values) for _, values in facts),
            )

    def close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()

    # ---- inside ----

    def _options(self, library: Any) -> dict[str, Any]:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        terms = self._terms
        options: dict[str, Any] = {
            "host": terms.address.host,
            "port": terms.address.port,
            "db": terms.address.database,
            "username": terms.address.user or None,
            "password": terms.password or None,
            "socket_timeout": terms.call_timeout_s,
            "socket_connect_timeout": terms.call_timeout_s,
            # Whoever waits has one timeout, not several.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if terms.address.has_tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": terms.ca_file or None,
                "ssl_certfile": terms.cert_file or None,
                "ssl_keyfile": terms.key_file or None,
                "ssl_check_hostname": True,
                "ssl_cert_reqs": "required",
            }
        return options

    def _pipeline(self) -> Any:
        return self._client.pipeline() if self._is_cluster else self._client.pipeline(transaction=False)

    def _ask_each(self, verb: str, keys: Sequence[Key], *rest: Any) -> list[Any]:
        if not keys:
            return []
        with self._pipeline() as calls:
            for key in keys:
                # A cluster's own methods for several keys answer otherwise than those of one server.
                calls.execute_command(verb, PREFIX + key, *rest)
            return list(calls.execute())

    def _nodes(self) -> list[redis.Redis]:
        if not self._is_cluster:
            return [self._client]
        return [self._client.get_redis_connection(node) for node in self._client.get_primaries()]

    def _is_taken(self, answer: object) -> bool:
        """A server that is full says so, and is asked again with the next record."""
        if isinstance(answer, self._errors.OutOfMemoryError):
            return False
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (self._errors.RedisError, OSError) as fault:
            self.close()
            reason = " ".join(str(fault).split()) or type(fault).__name__
            raise StoreFaultError(reason) from fault
