"""Counts what each tenant, model and agent's session asked for, got and occupied. The counts of each kind add up to
those of the domain."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np

from kvoffload.protocol import AgentSession, AgentSessions, LedgerKind, LedgerRow, NamedCount, Query
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.limits import ARRAY_ITEMS, NAME_BYTES
from kvoffload.protocol.opening import find_model
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Registration
from kvoffload.server.tiering.counts import cut_text

SESSION_ACCOUNTS = 1024
"""Number of agents' sessions with accounts of their own."""
MODEL_ACCOUNTS = 30
"""Number of models with accounts of their own."""
TENANT_ACCOUNTS = 64
"""Number of tenants with accounts of their own: as many as a pool has, with the one without a name."""
LOOK_NS = 1_000_000_000
"""Nanoseconds between two looks at what is occupied."""
_KIB_S = 1024 * 1_000_000_000
"""Number of byte-nanoseconds in a KiB-second."""


@dataclass(slots=True, kw_only=True)
class Account:
    """Counts of one tenant, model or session."""

    prompts: int = 0
    asked: int = 0
    promised: int = 0
    lower: int = 0
    saved_us: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    tier_read_bytes: int = 0
    tier_written_bytes: int = 0
    memory_byte_ns: int = 0
    """Bytes of memory, times the nanoseconds for which they were occupied."""

    def add(self, other: Account) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_COUNTS = tuple(field.name for field in fields(Account))


class LedgerTable:
    """Accounts of one kind, as many as `limit`, and one for the rest."""

    def __init__(self, limit: int) -> None:
        self.rest = Account()
        self._limit = limit
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        """Accounts by name. The one with the latest prompt comes last."""
        self._payers: dict[str, str] = {}
        """The tenant or user that brought each name first, by name."""
        self._counts: Counter[str] = Counter()
        """Number of names of each payer."""

    def __len__(self) -> int:
        return len(self._accounts)

    def use(self, name: str, payer: str = "") -> Account:
        """Returns the account of a name that has a prompt now. If there are too many, the payer with the most loses the
        one whose last prompt is the longest ago, which becomes a part of the rest."""
        if name in self._accounts:
            self._accounts.move_to_end(name)
            return self._accounts[name]
        if len(self._accounts) >= self._limit:
            self._fold_one(payer)
        return self._open(name, payer)

    def find(self, name: str) -> Account:
        """Returns the account of a name that has no prompt now: the rest's if there is no room for one of its own."""
        known = self._accounts.get(name)
        if known is None:
            return self.rest if len(self._accounts) >= self._limit else self._open(name, "")
        return known

    def latest_first(self) -> Iterator[tuple[str, Account]]:
        """Yields names with their accounts."""
        return reversed(self._accounts.items())

    def _open(self, name: str, payer: str) -> Account:
        self._payers[name] = payer
        self._counts[payer] += 1
        account = self._accounts[name] = Account()
        return account

    def _fold_one(self, payer: str) -> None:
        """Makes room for one more name of a payer, which counts as one of his."""
        most = max(self._counts, key=lambda one: self._counts[one] + (one == payer))
        name = next(name for name in self._accounts if self._payers[name] == most)
        self.rest.add(self._accounts.pop(name))
        del self._payers[name]
        self._counts -= Counter((most,))


class Ledger:
    """The ledger of one domain. Belongs to the thread of the server's core."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._tenants = LedgerTable(TENANT_ACCOUNTS)
        self._models = LedgerTable(MODEL_ACCOUNTS)
        self._sessions = LedgerTable(SESSION_ACCOUNTS)
        self._names: dict[bytes, str] = {}
        """Names of models, by fingerprint."""
        self._looked_ns: int | None = None
        """Time of the last look at what is occupied, or None if there was none."""
        self._memory_byte_ns = 0
        self._tier_byte_ns: Counter[str] = Counter()

    def take(self, registration: Registration, query: Query, read_bytes: int, *, owner: str = "") -> None:
        """Counts a prompt, which got so many bytes of blocks. `owner` is the user whose engine reports it."""
        payer = f"tenant {registration.tenant}" if registration.tenant else owner
        promised = min(query.promised, query.asked)
        counted = Account(
            prompts=1,
            asked=query.asked,
            promised=promised,
            lower=min(query.lower, promised),
            saved_us=query.saved_us,
            read_bytes=read_bytes,
        )
        self._tenants.use(_find_tenant(registration, query.tenant)).add(counted)
        self._models.use(self._name_model(registration.register.fingerprint), payer).add(counted)
        session = self._sessions.use(query.session, payer) if query.session else self._sessions.rest
        session.add(counted)

    def take_saved(self, registration: Registration, saved_bytes: bytes) -> None:
        """Counts what an engine has saved, by tenant as `explain` has it."""
        for place, size_bytes in enumerate(np.frombuffer(saved_bytes, "<u8").tolist()):
            if size_bytes:
                self._tenants.find(_find_tenant(registration, place)).written_bytes += size_bytes
                self._models.find(self._name_model(registration.register.fingerprint)).written_bytes += size_bytes

    def note_moved(self, fingerprint: bytes, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """Counts blocks of an identity that a slower tier has brought up, or has taken."""
        account = self._models.find(self._name_model(fingerprint))
        account.tier_read_bytes += read_bytes
        account.tier_written_bytes += written_bytes

    def look(self, now_ns: int) -> None:
        """Adds what has been occupied since the last look, as if it had been as much as now all the time."""
        domain = self._domain
        if domain.cache is None:
            return
        since_ns = 0 if self._looked_ns is None else now_ns - self._looked_ns
        self._looked_ns = now_ns
        stats = domain.cache.stats
        self._memory_byte_ns += stats.used_bytes * since_ns
        for tenant in stats.tenants:
            if tenant.used_bytes:
                self._tenants.find(tenant.name).memory_byte_ns += tenant.used_bytes * since_ns
        if len(self._names) > 2 * len(domain.registers) + MODEL_ACCOUNTS:
            self._names.clear()
        for name_space, used_bytes in domain.cache.used_by_each().items():
            name = self._name_model(domain.fingerprints.get(name_space, b""))
            self._models.find(name).memory_byte_ns += used_bytes * since_ns
        for tier in () if domain.traffic is None else domain.traffic.tiers:
            self._tier_byte_ns[tier.settings.name] += sum(place.used_bytes for place in tier.health()) * since_ns

    def list_sessions(self, first: int) -> AgentSessions:
        """Returns as many sessions as fit a message, from number `first` on, counted from the latest, and the rest."""
        shown = islice(self._sessions.latest_first(), first, first + ARRAY_ITEMS)
        return AgentSessions(
            total=len(self._sessions),
            sessions=tuple(_describe_session(name, account) for name, account in shown),
            rest=(_describe_session("", self._sessions.rest),),
        )

    @property
    def rows(self) -> tuple[LedgerRow, ...]:
        """Rows of tenants and models, those with the latest prompts first, and the rest of each kind."""
        return (*_describe(LedgerKind.TENANT, self._tenants), *_describe(LedgerKind.MODEL, self._models))

    @property
    def memory_kib_s(self) -> int:
        """KiB of memory, times the seconds for which they were occupied, as memory counts them as a whole."""
        return _fit(self._memory_byte_ns // _KIB_S)

    @property
    def tier_kib_s(self) -> tuple[NamedCount, ...]:
        """The same of each slower tier."""
        return tuple(NamedCount(name=name, count=_fit(found // _KIB_S)) for name, found in self._tier_byte_ns.items())

    def _name_model(self, fingerprint: bytes) -> str:
        name = self._names.get(fingerprint)
        if name is None:
            register = self._domain.registers.get(fingerprint)
            if register is None:
                return ""
            name = self._names[fingerprint] = cut_text(find_model(register.identity), NAME_BYTES)
        return name


def _find_tenant(registration: Registration, place: int) -> str:
    """Returns the name of the tenant at a place of those that the session may name, or of the session's own tenant."""
    tenants: Mapping[str, int] = registration.tenants
    if 0 < place <= len(tenants):
        return next(islice(tenants, place - 1, None))
    return next((name for name, number in tenants.items() if number == registration.tenant), "")


def _describe(kind: LedgerKind, table: LedgerTable) -> Iterator[LedgerRow]:
    for name, account in table.latest_first():
        yield _describe_account(kind, name, account, is_rest=False)
    yield _describe_account(kind, "", table.rest, is_rest=True)


def _describe_account(kind: LedgerKind, name: str, account: Account, *, is_rest: bool) -> LedgerRow:
    return LedgerRow(
        kind=kind,
        name=name,
        is_rest=is_rest,
        prompts=account.prompts,
        asked=_fit(account.asked),
        promised=_fit(account.promised),
        lower=_fit(account.lower),
        saved_us=_fit(account.saved_us),
        read_bytes=_fit(account.read_bytes),
        written_bytes=_fit(account.written_bytes),
        memory_kib_s=_fit(account.memory_byte_ns // _KIB_S),
        tier_read_bytes=_fit(account.tier_read_bytes),
        tier_written_bytes=_fit(account.tier_written_bytes),
    )


def _describe_session(name: str, account: Account) -> AgentSession:
    return AgentSession(
        name=name,
        turns=account.prompts,
        asked=_fit(account.asked),
        promised=_fit(account.promised),
        lower=_fit(account.lower),
        saved_us=_fit(account.saved_us),
        read_bytes=_fit(account.read_bytes),
    )


def _fit(count: int) -> int:
    """Cuts a count to what a message's field can hold, because engines may send any numbers."""
    return min(count, U64_MAX)
