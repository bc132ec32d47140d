"""A hash in Valkey where the servers of a fleet announce themselves, and are forgotten when they go."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvoffload.errors import TierError
from kvoffload.peers.announcement import Announcement, read_announcement
from kvoffload.peers.fleet_member import FleetMember
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import read_count
from kvoffload.tiers.valkey import ValkeySettings
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyNodes, as_bytes, check_answer

logger = logging.getLogger(__name__)

_FORGOTTEN_MS = 3_600_000
"""Age beyond which the servers that see an announcement remove it."""
_AHEAD_MS = 5_000
"""How far a live server's announcement may be in the future: it can be written while others are read."""
_PAGE, _PAGES = b"64", 64
"""About how many announcements a page has, and how many pages one look reads. Unsigned announcements are removed."""
FAREWELL_S = 5.0
_MARK_LETTERS = 8
_ORDERS = 4096
"""The most servers whose last announcement is remembered after they have gone."""
_TOLERANCE_MS = 1000
"""A clock that is led back to the right time runs faster or slower meanwhile; that does not count as set."""
_TOLERANCE_RATE = 1 / 1000


@dataclass(frozen=True, kw_only=True)
class RegistrySettings:
    """The registry of a fleet, and the times of its announcements."""

    valkey: ValkeySettings
    fleet: str
    secret: bytes = field(repr=False)
    every_s: float = 5.0
    """Seconds between two looks at the registry. With each look the server announces itself again."""
    good_for_s: float = 20.0

    @property
    def key(self) -> bytes:
        """The registry's key. It depends on the secret, so fleets of one name with other secrets do not meet; and on
        the form of announcements, so servers that write another form do not remove these."""
        mark = hmac.new(self.secret, b"kvoffload board 2", hashlib.sha256).hexdigest()[:_MARK_LETTERS]
        return f"kvoffload:fleet:{self.fleet}:{mark}".encode()


@dataclass(frozen=True, kw_only=True)
class _Sighting:
    """The newest announcement of a member, and the time at which it was made.

    While a member is announced, its first address counts: one with the same key elsewhere is another server.
    """

    announcement: Announcement
    since_s: float
    newest_ms: int
    """The time of the newest announcement under this name, by the registry's clock."""
    other_at: str = ""
    """The address of a second server of this name; empty: none."""
    is_told: bool = False
    """Whether the log says already that there are two."""


@dataclass(frozen=True)
class _Reading:
    told_ms: int
    asked_s: float
    answered_s: float


class RegistryClock:
    """Detects that the registry's clock was set, by this machine's monotonic clock, which cannot be set.

    Belongs to one thread. The caller passes the times at which it asked the registry and was answered, by that clock.
    """

    def __init__(self) -> None:
        self._last: _Reading | None = None

    def read(self, told_ms: int, *, asked_s: float, answered_s: float) -> int:
        """Returns by how many milliseconds the registry's clock was set since the last reading; 0: it was not set."""
        last, self._last = self._last, _Reading(told_ms, asked_s, answered_s)
        if last is None:
            return 0
        went_ms = told_ms - last.told_ms
        # The clock was read at an unknown time between the question and the answer.
        least_ms = int((asked_s - last.answered_s) * 1000)
        most_ms = int((answered_s - last.asked_s) * 1000)
        slack_ms = _TOLERANCE_MS + int(most_ms * _TOLERANCE_RATE)
        if least_ms - slack_ms <= went_ms <= most_ms + slack_ms:
            return 0
        return went_ms - (most_ms if went_ms > most_ms else least_ms)


class FleetRegistry:
    """Reads and writes announcements on its own thread. While the registry cannot be read, the members stay the
    same."""

    def __init__(
        self, settings: RegistrySettings, own: FleetMember, on_members: Callable[[Sequence[FleetMember]], None]
    ) -> None:
        """`on_members` gets all other members, sorted, after each look; it is called on the registry's thread."""
        self._settings = settings
        self._own = own
        self._on_members = on_members
        self._seen: dict[str, _Sighting] = {}
        """The sightings of other servers, by name."""
        self._orders: dict[FleetMember, int] = {}
        """The order of the newest announcement of each server, at each of its addresses, this one's own included."""
        self._members: list[str] = []
        """The names of the members that `on_members` got last."""
        self._own_ms = 0
        """The time of the last announcement that was written; 0: there is none, or the clock was set since."""
        self._clock = RegistryClock()
        self._twin_at = ""
        self._twin_s = 0.0
        self._is_lost: bool | None = None
        """Whether the last look failed; None: the registry has not been read yet."""
        self._nodes: ValkeyNodes | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-registry", daemon=True)

    @property
    def twin_at(self) -> str:
        """The address of another server that announces itself with this one's key; empty: none does. From any
        thread."""
        return self._twin_at

    def start(self) -> None:
        """Starts the thread. TierError: it cannot be started."""
        try:
            self._thread.start()
        except RuntimeError as fault:
            raise TierError(f"a thread for the registry of the fleet cannot be started: {fault}") from fault

    def close(self) -> None:
        """Announces this server's farewell, if the registry can be reached soon, and ends the thread."""
        self._ending.set()
        self._thread.join(FAREWELL_S)
        nodes = self._nodes
        if self._thread.is_alive() and nodes is not None:
            nodes.interrupt()
        # A thread that cannot be interrupted, as while it resolves a name, holds nothing that others need.
        self._thread.join(FAREWELL_S)

    def _run(self) -> None:
        view = ClusterView()
        while True:
            is_last = self._ending.is_set()
            try:
                nodes = self._nodes = self._nodes or ValkeyNodes(self._settings.valkey, view)
                nodes.begin(is_certain=True)
                self.look(nodes, is_last=is_last)
            except StoreFaultError as fault:
                self._lose(fault)
            except Exception:
                # No fault may take this server out of its fleet.
                logger.exception("the registry of the fleet could not be read")
            if is_last:
                break
            self._ending.wait(self._settings.every_s)
        if self._nodes is not None:
            self._nodes.close()

    # ---- inside ----

    def look(self, nodes: ValkeyNodes, *, is_last: bool) -> None:
        settings = self._settings
        registry = nodes.of(settings.key)
        asked_s = time.monotonic()
        told = check_answer(registry.ask(b"TIME"))
        if not isinstance(told, list) or len(told) != 2:
            raise StoreFaultError("it does not speak as it should: a time without seconds")
        now_ms = read_count(as_bytes(told[0])) * 1000 + read_count(as_bytes(told[1])) // 1000
        self._follow_clock(self._clock.read(now_ms, asked_s=asked_s, answered_s=time.monotonic()))
        cursor = b"0"
        for _ in range(_PAGES):
            page = check_answer(registry.ask(b"HSCAN", settings.key, cursor, b"COUNT", _PAGE))
            if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list) or len(page[1]) % 2:
                raise StoreFaultError("it does not speak as it should: a hash without fields")
            texts = [as_bytes(word) for word in page[1]]
            taken_down = self._read(dict(zip(texts[::2], texts[1::2], strict=True)), now_ms)
            if taken_down:
                check_answer(registry.ask(b"HDEL", settings.key, *taken_down))
            cursor = as_bytes(page[0])
            if cursor == b"0":
                break
        # Written after the look, so that the look has seen what another server wrote by this one's name.
        self._own_ms = max(now_ms, self._own_ms + 1)
        # By this machine's clock, and behind what this server wrote before it was started again.
        order = max(time.time_ns() // 1_000_000, self._orders.get(self._own, 0) + 1)
        own = Announcement(member=self._own, at_ms=self._own_ms, order=order, is_gone=is_last)
        self._orders[self._own] = order
        check_answer(
            registry.ask(b"HSET", settings.key, self._own.name.encode(), own.sign(settings.fleet, settings.secret))
        )
        members = self._list_members(now_ms)
        if self._is_lost is not False:
            # Servers with another secret are not seen, and do not see this one.
            said = "the registry of fleet %s answers; other servers announced there with this secret: %d"
            logger.info(said, settings.fleet, len(members))
        self._is_lost = False
        self._end_twin()
        self._on_members(members)

    def _follow_clock(self, set_by_ms: int) -> None:
        """Shifts the times of all sightings when the registry's clock was set, so that they stay as old as they
        were."""
        if not set_by_ms:
            return
        logger.warning(
            "the clock of the registry of fleet %s was set by %+.1f s, or this machine slept; its members stay",
            self._settings.fleet,
            set_by_ms / 1000,
        )
        self._own_ms = 0
        self._seen = {name: replace(one, newest_ms=one.newest_ms + set_by_ms) for name, one in self._seen.items()}

    def _read(self, written: dict[bytes, bytes], now_ms: int) -> list[bytes]:
        """Notes the servers that are announced, and returns the names whose announcements should be removed.

        An announcement that is not newer than one already seen of this server, by its order, is ignored: another writer
        has put it back, and may have set the clock, too. So is one of the future: it is from a time when the clock was
        wrong.
        """
        others = []
        for name, text in written.items():
            announcement = read_announcement(text, self._settings.fleet, self._settings.secret)
            if (
                announcement is None
                or announcement.member.name.encode() != name
                or abs(now_ms - announcement.at_ms) > _FORGOTTEN_MS
            ):
                others.append(name)
            elif announcement.at_ms - now_ms > _AHEAD_MS or not self._is_next(announcement):
                continue
            elif announcement.member.name == self._own.name:
                self._note_own(announcement)
            else:
                self._note(announcement, max(now_ms - announcement.at_ms, 0) / 1000)
        return others

    def _is_next(self, announcement: Announcement) -> bool:
        """Whether an announcement is newer than all that were seen of its server at its address, and notes that."""
        if announcement.order <= self._orders.get(announcement.member, 0):
            return False
        self._orders.pop(announcement.member, None)
        self._orders[announcement.member] = announcement.order
        if len(self._orders) > _ORDERS:
            del self._orders[next(iter(self._orders))]
        return True

    def _note(self, announcement: Announcement, age_s: float) -> None:
        now_s, name, member = time.monotonic(), announcement.member.name, announcement.member
        before = self._seen.get(name)
        if before is not None and announcement.at_ms <= before.newest_ms:
            return
        new = _Sighting(announcement=announcement, since_s=now_s - age_s, newest_ms=announcement.at_ms)
        if before is None or before.announcement.is_gone or now_s - before.since_s > self._settings.good_for_s:
            self._seen[name] = new
        elif before.announcement.member.address != member.address:
            self._seen[name] = replace(before, newest_ms=announcement.at_ms, other_at=str(member.address))
        else:
            # It may have been killed and started elsewhere, but not if it is here again.
            if before.other_at and not before.is_told:
                logger.warning(
                    "two servers of fleet %s have one key, at %s and at %s, and only the first one is asked; give each "
                    "a key of its own",
                    self._settings.fleet,
                    member.address,
                    before.other_at,
                )
            is_told = before.is_told or bool(before.other_at)
            self._seen[name] = replace(new, other_at=before.other_at, is_told=is_told)

    def _note_own(self, announcement: Announcement) -> None:
        """Notes an announcement under this server's name. One that is newer than its own comes from another server."""
        if not self._own_ms or announcement.at_ms <= self._own_ms or announcement.is_gone:
            return
        self._twin_s = time.monotonic()
        self._twin_at = self._twin_at or str(announcement.member.address)

    def _end_twin(self) -> None:
        if self._twin_at and time.monotonic() - self._twin_s > self._settings.good_for_s:
            self._twin_at = ""

    def _list_members(self, now_ms: int) -> list[FleetMember]:
        """Returns the other members that are there.

        When the registry was away, no server could write to it, so former members count as just seen. A registry that
        has lost its announcements is not taken for a farewell.
        """
        now_s, good_for_s = time.monotonic(), self._settings.good_for_s
        if self._is_lost:
            self._seen |= {name: replace(self._seen[name], since_s=now_s) for name in self._members}
        self._seen = {name: one for name, one in self._seen.items() if abs(now_ms - one.newest_ms) <= _FORGOTTEN_MS}
        self._members = [
            name
            for name, one in sorted(self._seen.items())
            if not one.announcement.is_gone and now_s - one.since_s <= good_for_s
        ]
        return [self._seen[name].announcement.member for name in self._members]

    def _lose(self, fault: StoreFaultError) -> None:
        """Logs once that the registry cannot be read, and drops the connections."""
        if not self._is_lost:
            logger.warning("the registry of fleet %s cannot be read: %s", self._settings.fleet, fault)
        self._is_lost = True
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None
