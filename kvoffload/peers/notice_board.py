"""A hash in Valkey where servers of a fleet pin notices: whoever comes is known to all, whoever goes is forgotten."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.notice import Notice, read_notice
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.valkey import ValkeyTerms
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyNodes, as_bytes, check_answer

logger = logging.getLogger(__name__)

_FORGOTTEN_MS = 3_600_000
"""Notices that are older are taken down by whoever sees them."""
_PAGE, _PAGES = b"64", 64
"""Of notices, about, and how many pages one look reads; it takes down what the fleet has not signed."""
_FAREWELL_S = 5.0
_MARK_LETTERS = 8


@dataclass(frozen=True, kw_only=True)
class BoardTerms:
    """Where a fleet meets."""

    valkey: ValkeyTerms
    fleet: str
    secret: bytes = field(repr=False)
    every_s: float = 5.0
    """Between two looks; a notice is pinned anew each time."""
    good_for_s: float = 20.0

    @property
    def key(self) -> bytes:
        """Fleets of one name and other secrets are not in each other's way."""
        mark = hmac.new(self.secret, b"kvoffload board", hashlib.sha256).hexdigest()[:_MARK_LETTERS]
        return f"kvoffload:fleet:{self.fleet}:{mark}".encode()


@dataclass(frozen=True)
class _Sighting:
    """The newest notice of a member, and since when it is one."""

    notice: Notice
    since_s: float


class NoticeBoard:
    """A thread of its own. While the board cannot be read, the members stay who they were."""

    def __init__(
        self, terms: BoardTerms, own: FleetMember, on_members: Callable[[Sequence[FleetMember]], None]
    ) -> None:
        """`on_members` is told of all others, sorted, after each look; on the board's thread."""
        self._terms = terms
        self._own = own
        self._on_members = on_members
        self._seen: dict[str, _Sighting] = {}
        """By name."""
        self._members: list[str] = []
        """As was told last."""
        self._own_ms = 0
        """Of the last notice that was pinned."""
        self._is_lost = False
        self._nodes: ValkeyNodes | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-board", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Says farewell, if the board can be reached soon."""
        self._ending.set()
        self._thread.join(_FAREWELL_S)
        nodes = self._nodes
        if self._thread.is_alive() and nodes is not None:
            nodes.interrupt()
        # A thread that cannot be interrupted, as when a name is looked up, has nothing that others need.
        self._thread.join(_FAREWELL_S)

    def _run(self) -> None:
        view = ClusterView()
        while True:
            try:
                nodes = self._nodes = self._nodes or ValkeyNodes(self._terms.valkey, view)
                nodes.begin(is_certain=True)
                self._look(nodes)
                if self._ending.is_set():
                    nodes.close()
                    return
            except StoreFaultError as fault:
                self._lose(fault)
                if self._ending.is_set():
                    return
            except Exception:
                # Whatever it is, this server must not leave its fleet for it.
                logger.exception("the board of the fleet could not be read")
                if self._ending.is_set():
                    return
            self._ending.wait(self._terms.every_s)

    # ---- inside ----

    def _look(self, nodes: ValkeyNodes) -> None:
        terms = self._terms
        board = nodes.of(terms.key)
        told = check_answer(board.ask(b"TIME"))
        if not isinstance(told, list) or len(told) != 2:
            raise StoreFaultError("it does not speak as it should: a time without seconds")
        now_ms = int(as_bytes(told[0])) * 1000 + int(as_bytes(told[1])) // 1000
        self._own_ms = max(now_ms, self._own_ms + 1)
        own = Notice(member=self._own, at_ms=self._own_ms, is_gone=self._ending.is_set())
        check_answer(board.ask(b"HSET", terms.key, self._own.name.encode(), own.sign(terms.fleet, terms.secret)))
        cursor = b"0"
        for _ in range(_PAGES):
            page = check_answer(board.ask(b"HSCAN", terms.key, cursor, b"COUNT", _PAGE))
            if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list) or len(page[1]) % 2:
                raise StoreFaultError("it does not speak as it should: a hash without fields")
            texts = [as_bytes(word) for word in page[1]]
            taken_down = self._read(dict(zip(texts[::2], texts[1::2], strict=True)), now_ms)
            if taken_down:
                check_answer(board.ask(b"HDEL", terms.key, *taken_down))
            cursor = as_bytes(page[0])
            if cursor == b"0":
                break
        members = self._list_members(now_ms)
        self._is_lost = False
        self._on_members(members)

    def _read(self, pinned: dict[bytes, bytes], now_ms: int) -> list[bytes]:
        """Notes who is there; which notices are to be taken down. A notice that is older than one that was seen is
        somebody else's doing."""
        now_s, others = time.monotonic(), []
        for name, text in pinned.items():
            notice = read_notice(text, self._terms.fleet, self._terms.secret)
            if notice is None or notice.member.name.encode() != name or abs(now_ms - notice.at_ms) > _FORGOTTEN_MS:
                others.append(name)
                continue
            before = self._seen.get(notice.member.name)
            if before is None or notice.at_ms > before.notice.at_ms:
                age_s = max(now_ms - notice.at_ms, 0) / 1000
                self._seen[notice.member.name] = _Sighting(notice, now_s - age_s)
        return others

    def _list_members(self, now_ms: int) -> list[FleetMember]:
        """Who is there beside this one. A board that has lost its notices is no farewell, and while it was away nobody
        could pin one."""
        now_s, good_for_s = time.monotonic(), self._terms.good_for_s
        if self._is_lost:
            self._seen |= {name: replace(self._seen[name], since_s=now_s) for name in self._members}
        self._seen = {name: one for name, one in self._seen.items() if abs(now_ms - one.notice.at_ms) <= _FORGOTTEN_MS}
        self._members = [
            name
            for name, one in sorted(self._seen.items())
            if name != self._own.name and not one.notice.is_gone and now_s - one.since_s <= good_for_s
        ]
        return [self._seen[name].notice.member for name in self._members]

    def _lose(self, fault: StoreFaultError) -> None:
        """Said once."""
        if not self._is_lost:
            logger.warning("the board of fleet %s cannot be read: %s", self._terms.fleet, fault)
        self._is_lost = True
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None
