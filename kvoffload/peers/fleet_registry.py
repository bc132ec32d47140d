"""A hash in Valkey where the servers of a fleet announce themselves, and are forgotten when they go."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvoffload.peers.announcement import Announcement, read_announcement
from kvoffload.peers.fleet_member import FleetMember
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import read_count
from kvoffload.tiers.valkey import ValkeyTerms
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyNodes, as_bytes, check_answer

logger = logging.getLogger(__name__)

_FORGOTTEN_MS = 3_600_000
"""Announcements that are older are taken down by whoever sees them."""
_AHEAD_MS = 5_000
"""Announcements of all that are alive are by this much in the future at most: written while these were read."""
_PAGE, _PAGES = b"64", 64
"""Of announcements, about, and how many pages one look reads; it takes down what the fleet has not signed."""
FAREWELL_S = 5.0
_MARK_LETTERS = 8
_TOLERANCE_MS = 1000
"""Clocks that are led back to the right time run faster or slower meanwhile; nobody has set them."""
_TOLERANCE_RATE = 1 / 1000


@dataclass(frozen=True, kw_only=True)
class RegistryTerms:
    """Where a fleet meets."""

    valkey: ValkeyTerms
    fleet: str
    secret: bytes = field(repr=False)
    every_s: float = 5.0
    """Between two looks; it announces itself anew each time."""
    good_for_s: float = 20.0

    @property
    def key(self) -> bytes:
        """Fleets of one name and other secrets are not in each other's way."""
        mark = hmac.new(self.secret, b"kvoffload board", hashlib.sha256).hexdigest()[:_MARK_LETTERS]
        return f"kvoffload:fleet:{self.fleet}:{mark}".encode()


@dataclass(frozen=True, kw_only=True)
class _Sighting:
    """The newest announcement of a member, and since when it is one.

    While a member is announced, it is where it was first: who has the same key elsewhere is another server.
    """

    announcement: Announcement
    since_s: float
    newest_ms: int
    """Of all that was written by this name."""
    other_at: str = ""
    """Where a second server of this name is."""
    is_told: bool = False
    """That there are two."""


@dataclass(frozen=True)
class _Reading:
    told_ms: int
    asked_s: float
    answered_s: float


class RegistryClock:
    """Tells when somebody has set the clock of the registry, by this machine's own, which nobody sets.

    Belongs to one thread. Whoever asks the registry says when it asked and was answered, by a monotonic clock.
    """

    def __init__(self) -> None:
        self._last: _Reading | None = None

    def read(self, told_ms: int, *, asked_s: float, answered_s: float) -> int:
        """Returns by how many milliseconds the registry's clock was set since the last reading; 0: it has just gone
        on."""
        last, self._last = self._last, _Reading(told_ms, asked_s, answered_s)
        if last is None:
            return 0
        went_ms = told_ms - last.told_ms
        # When within a question the clock was read is not known.
        least_ms = int((asked_s - last.answered_s) * 1000)
        most_ms = int((answered_s - last.asked_s) * 1000)
        slack_ms = _TOLERANCE_MS + int(most_ms * _TOLERANCE_RATE)
        if least_ms - slack_ms <= went_ms <= most_ms + slack_ms:
            return 0
        return went_ms - (most_ms if went_ms > most_ms else least_ms)


class FleetRegistry:
    """A thread of its own. While the registry cannot be read, the members stay who they were."""

    def __init__(
        self, terms: RegistryTerms, own: FleetMember, on_members: Callable[[Sequence[FleetMember]], None]
    ) -> None:
        """`on_members` is told of all others, sorted, after each look; on the registry's thread."""
        self._terms = terms
        self._own = own
        self._on_members = on_members
        self._seen: dict[str, _Sighting] = {}
        """By name."""
        self._members: list[str] = []
        """As was told last."""
        self._own_ms = 0
        """Of the last announcement that was written; 0: there is none, or the clock was set since."""
        self._clock = RegistryClock()
        self._twin_at = ""
        self._twin_s = 0.0
        self._is_lost: bool | None = None
        """None: it has not been read yet."""
        self._nodes: ValkeyNodes | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-registry", daemon=True)

    @property
    def twin_at(self) -> str:
        """Where another server announces itself with this one's key; empty: nobody does. From any thread."""
        return self._twin_at

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Says farewell, if the registry can be reached soon."""
        self._ending.set()
        self._thread.join(FAREWELL_S)
        nodes = self._nodes
        if self._thread.is_alive() and nodes is not None:
            nodes.interrupt()
        # A thread that cannot be interrupted, as when a name is looked up, has nothing that others need.
        self._thread.join(FAREWELL_S)

    def _run(self) -> None:
        view = ClusterView()
        while True:
            is_last = self._ending.is_set()
            try:
                nodes = self._nodes = self._nodes or ValkeyNodes(self._terms.valkey, view)
                nodes.begin(is_certain=True)
                self.look(nodes, is_last=is_last)
            except StoreFaultError as fault:
                self._lose(fault)
            except Exception:
                # Whatever it is, this server must not leave its fleet for it.
                logger.exception("the registry of the fleet could not be read")
            if is_last:
                break
            self._ending.wait(self._terms.every_s)
        if self._nodes is not None:
            self._nodes.close()

    # ---- inside ----

    def look(self, nodes: ValkeyNodes, *, is_last: bool) -> None:
        terms = self._terms
        registry = nodes.of(terms.key)
        asked_s = time.monotonic()
        told = check_answer(registry.ask(b"TIME"))
        if not isinstance(told, list) or len(told) != 2:
            raise StoreFaultError("it does not speak as it should: a time without seconds")
        now_ms = read_count(as_bytes(told[0])) * 1000 + read_count(as_bytes(told[1])) // 1000
        self._follow_clock(self._clock.read(now_ms, asked_s=asked_s, answered_s=time.monotonic()))
        cursor = b"0"
        for _ in range(_PAGES):
            page = check_answer(registry.ask(b"HSCAN", terms.key, cursor, b"COUNT", _PAGE))
            if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list) or len(page[1]) % 2:
                raise StoreFaultError("it does not speak as it should: a hash without fields")
            texts = [as_bytes(word) for word in page[1]]
            taken_down = self._read(dict(zip(texts[::2], texts[1::2], strict=True)), now_ms)
            if taken_down:
                check_answer(registry.ask(b"HDEL", terms.key, *taken_down))
            cursor = as_bytes(page[0])
            if cursor == b"0":
                break
        # Behind the look: what another server has written by this one's name is to be seen.
        self._own_ms = max(now_ms, self._own_ms + 1)
        own = Announcement(member=self._own, at_ms=self._own_ms, is_gone=is_last)
        check_answer(registry.ask(b"HSET", terms.key, self._own.name.encode(), own.sign(terms.fleet, terms.secret)))
        members = self._list_members(now_ms)
        if self._is_lost is not False:
            # Who has another secret is not seen, and does not see this one.
            said = "the registry of fleet %s answers; other servers announced there with this secret: %d"
            logger.info(said, terms.fleet, len(members))
        self._is_lost = False
        self._end_twin()
        self._on_members(members)

    def _follow_clock(self, set_by_ms: int) -> None:
        """All that was seen is as old as it was before somebody set the registry's clock."""
        if not set_by_ms:
            return
        logger.warning(
            "the clock of the registry of fleet %s was set by %+.1f s, or this machine slept; its members stay",
            self._terms.fleet,
            set_by_ms / 1000,
        )
        self._own_ms = 0
        self._seen = {name: replace(one, newest_ms=one.newest_ms + set_by_ms) for name, one in self._seen.items()}

    def _read(self, written: dict[bytes, bytes], now_ms: int) -> list[bytes]:
        """Notes who is there, and returns the names whose announcements are to be removed.

        An announcement that is older than one that was seen is somebody else's doing, and one of the future is of a
        time when the clock was wrong.
        """
        others = []
        for name, text in written.items():
            announcement = read_announcement(text, self._terms.fleet, self._terms.secret)
            if (
                announcement is None
                or announcement.member.name.encode() != name
                or abs(now_ms - announcement.at_ms) > _FORGOTTEN_MS
            ):
                others.append(name)
            elif announcement.at_ms - now_ms > _AHEAD_MS:
                continue
            elif announcement.member.name == self._own.name:
                self._note_own(announcement)
            else:
                self._note(announcement, max(now_ms - announcement.at_ms, 0) / 1000)
        return others

    def _note(self, announcement: Announcement, age_s: float) -> None:
        now_s, name, member = time.monotonic(), announcement.member.name, announcement.member
        before = self._seen.get(name)
        if before is not None and announcement.at_ms <= before.newest_ms:
            return
        new = _Sighting(announcement=announcement, since_s=now_s - age_s, newest_ms=announcement.at_ms)
        if before is None or before.announcement.is_gone or now_s - before.since_s > self._terms.good_for_s:
            self._seen[name] = new
        elif before.announcement.member.address != member.address:
            self._seen[name] = replace(before, newest_ms=announcement.at_ms, other_at=str(member.address))
        else:
            # It may have been killed and started elsewhere, but not if it is here again.
            if before.other_at and not before.is_told:
                logger.warning(
                    "two servers of fleet %s have one key, at %s and at %s, and only the first one is asked; give each "
                    "a key of its own",
                    self._terms.fleet,
                    member.address,
                    before.other_at,
                )
            is_told = before.is_told or bool(before.other_at)
            self._seen[name] = replace(new, other_at=before.other_at, is_told=is_told)

    def _note_own(self, announcement: Announcement) -> None:
        """Notes an announcement that has this server's name. What it has written itself before is not newer."""
        if not self._own_ms or announcement.at_ms <= self._own_ms or announcement.is_gone:
            return
        self._twin_s = time.monotonic()
        self._twin_at = self._twin_at or str(announcement.member.address)

    def _end_twin(self) -> None:
        if self._twin_at and time.monotonic() - self._twin_s > self._terms.good_for_s:
            self._twin_at = ""

    def _list_members(self, now_ms: int) -> list[FleetMember]:
        """Returns who is there beside this one.

        A registry that has lost its announcements is no farewell, and while it was away nobody could write one.
        """
        now_s, good_for_s = time.monotonic(), self._terms.good_for_s
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
        """Says once that the registry cannot be read."""
        if not self._is_lost:
            logger.warning("the registry of fleet %s cannot be read: %s", self._terms.fleet, fault)
        self._is_lost = True
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None
