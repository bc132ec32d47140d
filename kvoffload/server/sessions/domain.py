"""A trust domain of the server: its cache, who may use it, and which identities are known in it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvoffload.cache import NO_LIMIT, CacheGeometry, LocalCache
from kvoffload.protocol import Error, ErrorCode, Greeting, HandshakeSettings, Register, agree_version
from kvoffload.server.common.refusal import refuse
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.settings import TierSpace


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    """A tenant, to whom blocks belong. A user of several tenants names one when it registers, and belongs to the first
    otherwise."""

    name: str
    quota_bytes: int = 0
    """Bytes of the pool that it keeps when the pool is full; 0: it has no share of its own."""
    uids: frozenset[int] | None = None
    """Users that may name this tenant, or None for all of the domain."""

    def admits(self, uid: int) -> bool:
        return self.uids is None or uid in self.uids


@dataclass(frozen=True, kw_only=True)
class DomainSettings:
    """Everyone in a domain can read all of its memory."""

    name: str
    uids: frozenset[int] | None = None
    """Users of the domain, or None for all users who can open the socket."""
    tenants: tuple[TenantSettings, ...] = ()
    held_limit_bytes: int = NO_LIMIT
    """Bytes that each session may hold in leases and reservations."""
    is_shared: bool = False
    """Whether several users may use the domain, so that each has a share of what leases and reservations take."""
    memory_bytes: int = 0
    """Size that an old server's memory must have to be adopted; 0: any size."""

    def admits(self, uid: int) -> bool:
        return self.uids is None or uid in self.uids


def note_sharing(domains: Iterable[DomainSettings], socket_mode: int) -> tuple[DomainSettings, ...]:
    """Notes which domains several users may use, of a server whose socket has this mode."""
    is_open = bool(socket_mode & 0o077)
    return tuple(replace(one, is_shared=is_open and (one.uids is None or len(one.uids) > 1)) for one in domains)


class FormerBytes:
    """Bytes of former servers' memories that a domain's processes still have. Each memory is counted once, with the
    largest size that a process has named. No call takes longer where more processes have such memories."""

    def __init__(self) -> None:
        self._sizes: dict[int, list[int]] = {}
        """Sizes that processes have named, in ascending order, by memory."""
        self._total = 0

    def change(self, before: Mapping[int, int], after: Mapping[int, int]) -> None:
        """Notes that a process has other memories than before. Both map memories to their bytes."""
        for memory, size_bytes in before.items():
            sizes = self._sizes[memory]
            self._total -= sizes[-1]
            del sizes[bisect_left(sizes, size_bytes)]
            if sizes:
                self._total += sizes[-1]
            else:
                del self._sizes[memory]
        for memory, size_bytes in after.items():
            sizes = self._sizes.setdefault(memory, [])
            self._total -= sizes[-1] if sizes else 0
            insort(sizes, size_bytes)
            self._total += sizes[-1]

    def count(self, own: int) -> int:
        """Returns the bytes of all memories but the domain's present one, which is `own`."""
        return self._total - self._sizes.get(own, [0])[-1]


class Domain:
    """Belongs to the thread of the server's core. It has no cache until memory is taken or adopted."""

    def __init__(
        self, settings: DomainSettings, handshake: HandshakeSettings, traffic: TierChain | None = None
    ) -> None:
        self.settings = settings
        without = {"promote"} if traffic is None else set()
        self.handshake = replace(handshake, domain=settings.name, capabilities=handshake.capabilities - without)
        self.traffic = traffic
        """Traffic with the tiers below the domain's memory, or None if there are none."""
        self.cache: LocalCache | None = None
        self.adopted_boot_id = 0
        self.registers: dict[bytes, Register] = {}
        """Accepted registrations by fingerprint."""
        self.fingerprints: dict[int, bytes] = {}
        """Fingerprints by namespace."""
        self.brought: dict[int, int] = {}
        """Users whose engines were the first to name an identity, by namespace."""
        self.geometries: dict[int, CacheGeometry] = {}
        self.sizes: Counter[int] = Counter()
        """Number of identities that have records of a size, by size."""
        self.user_sizes: dict[int, Counter[int]] = {}
        """The same for the identities that engines of one user brought, by user."""
        self.used_last: dict[int, None] = {}
        """Namespaces in the order of their last use. The one that no session has registered for longest comes first."""
        self.former = FormerBytes()
        """Memories of former servers that the processes of the domain's sessions have."""
        self._tenants: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self.settings.name

    def attach(self, cache: LocalCache, *, adopted_boot_id: int = 0) -> None:
        assert self.cache is None, f"domain {self.name!r} has its memory already"
        self._tenants = {
            tenant.name: cache.open_tenant(tenant.name, quota_bytes=tenant.quota_bytes)
            for tenant in self.settings.tenants
        }
        self.cache = cache
        self.adopted_boot_id = adopted_boot_id

    def learn(self, name_space: int, fingerprint: bytes, geometry: CacheGeometry, uid: int | None) -> None:
        """Notes an identity. `uid`: the user whose engine named it, or None for a peer."""
        if name_space not in self.fingerprints:
            self.sizes.update(sizes_of(geometry))
            if uid is not None:
                self.brought[name_space] = uid
                self.user_sizes.setdefault(uid, Counter()).update(sizes_of(geometry))
        self.fingerprints[name_space] = fingerprint
        self.geometries[name_space] = geometry
        self.note_use(name_space)

    def find_space(self, name_space: int) -> TierSpace:
        """Returns what is known of an identity. KeyError: nothing is."""
        geometry = self.geometries[name_space]
        return TierSpace(number=name_space, fingerprint=self.fingerprints[name_space], geometry=geometry)

    def note_use(self, name_space: int) -> None:
        """Notes that a session has registered the identity, now or still."""
        self.used_last.pop(name_space, None)
        self.used_last[name_space] = None

    def forget(self, name_space: int) -> bytes:
        """Forgets an identity that no engine uses any more. Returns its fingerprint."""
        fingerprint = self.fingerprints.pop(name_space)
        sizes = sizes_of(self.geometries.pop(name_space))
        self.registers.pop(fingerprint, None)
        uid = self.brought.pop(name_space, None)
        for counts in (self.sizes, self.user_sizes.get(uid) if uid is not None else None):
            if counts is not None:
                _take_one(counts, sizes)
        if uid is not None and not self.user_sizes[uid]:
            del self.user_sizes[uid]
        self.used_last.pop(name_space, None)
        return fingerprint

    def list_tenants(self, uid: int) -> dict[str, int]:
        """Returns the tenants that this user may name, in the order of the configuration."""
        return {tenant.name: self._tenants[tenant.name] for tenant in self.settings.tenants if tenant.admits(uid)}

    def choose_tenant(self, message: Register, uid: int) -> int | Error:
        """Returns the tenant whose quota pays; 0: none."""
        allowed = self.list_tenants(uid)
        if not message.tenant:
            return next(iter(allowed.values()), 0)
        if message.tenant in allowed:
            return allowed[message.tenant]
        return refuse(message, ErrorCode.NOT_ALLOWED, f"user {uid} is not of tenant {message.tenant!r}")


def sizes_of(geometry: CacheGeometry) -> set[int]:
    """Returns the sizes of a block's records of each group, all shards together."""
    return {group.record_bytes * group.shards for group in geometry.groups}


def _take_one(counts: Counter[int], sizes: Iterable[int]) -> None:
    for size in sizes:
        counts[size] -= 1
        if not counts[size]:
            del counts[size]


def choose_domain(domains: Mapping[str, Domain], greeting: Greeting, uid: int) -> Domain | Error:
    """Returns the domain that the greeting names, or else the first that this user may use."""
    allowed = [domain for domain in domains.values() if domain.settings.admits(uid)]
    named = domains.get(greeting.domain)
    if not allowed or (named is not None and named not in allowed):
        place = "this server" if named is None else f"domain {greeting.domain!r}"
        return refuse(greeting, ErrorCode.NOT_ALLOWED, f"user {uid} may not use {place}")
    # An unknown name is refused by the settings of the first one, which say which domain there is.
    domain = named or allowed[0]
    protocol = agree_version(domain.handshake, greeting)
    return protocol if isinstance(protocol, Error) else domain
