"""A hash in Valkey where servers of a fleet pin notices: whoever comes is known to all, whoever goes is forgotten."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.notice import Notice, read_notice
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.valkey import ValkeyTerms
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyNodes, as_bytes, check_answer

logger = logging.getLogger(__name__)

MAX_MEMBERS = 1024
"""More notices than that are not read."""
_FORGOTTEN_MS = 3_600_000
"""Notices that are older are taken down by whoever sees them."""


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
        return b"kvoffload:fleet:" + self.fleet.encode()


class NoticeBoard:
    """A thread of its own. While the board cannot be read, the members stay who they were."""

    def __init__(
        self, terms: BoardTerms, own: FleetMember, on_members: Callable[[Sequence[FleetMember]], None]
    ) -> None:
        """`on_members` is told of all others, sorted, after each look; on the board's thread."""
        self._terms = terms
        self._own = own
        self._on_members = on_members
        self._seen: dict[str, tuple[FleetMember, float]] = {}
        """By name: who, and when it was seen last."""
        self._is_lost = False
        self._nodes: ValkeyNodes | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-board", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Says farewell, if the board can be reached."""
        self._ending.set()
        self._thread.join()

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
        own = Notice(member=self._own, at_ms=now_ms, is_gone=self._ending.is_set()).sign(terms.fleet, terms.secret)
        check_answer(board.ask(b"HSET", terms.key, self._own.name.encode(), own))
        count = check_answer(board.ask(b"HLEN", terms.key))
        if not isinstance(count, int):
            raise StoreFaultError("it does not speak as it should: a hash without a length")
        if count > MAX_MEMBERS:
            raise StoreFaultError(f"{count} notices are pinned for fleet {terms.fleet}, {MAX_MEMBERS} are allowed")
        pinned = check_answer(board.ask(b"HGETALL", terms.key))
        if not isinstance(pinned, list):
            raise StoreFaultError("it does not speak as it should: a hash without fields")
        texts = [as_bytes(word) for word in pinned]
        members, old = self._read(dict(zip(texts[::2], texts[1::2], strict=True)), now_ms)
        if old:
            check_answer(board.ask(b"HDEL", terms.key, *old))
        self._is_lost = False
        self._on_members(members)

    def _read(self, pinned: dict[bytes, bytes], now_ms: int) -> tuple[list[FleetMember], list[bytes]]:
        """Who is there beside this one, and which notices are to be taken down. A board that has lost its notices is no
        farewell."""
        now_s, old = time.monotonic(), []
        for name, text in pinned.items():
            notice = read_notice(text, self._terms.fleet, self._terms.secret)
            if notice is None or notice.member.name.encode() != name:
                continue
            age_ms = abs(now_ms - notice.at_ms)
            if age_ms > _FORGOTTEN_MS:
                old.append(name)
            elif notice.is_gone:
                self._seen.pop(notice.member.name, None)
            elif age_ms <= self._terms.good_for_s * 1000 and notice.member.name != self._own.name:
                self._seen[notice.member.name] = notice.member, now_s
        self._seen = {
            name: (member, seen_s)
            for name, (member, seen_s) in self._seen.items()
            if now_s - seen_s <= self._terms.good_for_s
        }
        return [self._seen[name][0] for name in sorted(self._seen)], old

    def _lose(self, fault: StoreFaultError) -> None:
        """Said once."""
        if not self._is_lost:
            logger.warning("the board of fleet %s cannot be read: %s", self._terms.fleet, fault)
        self._is_lost = True
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None
