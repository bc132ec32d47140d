"""The same questions asked of a cache server: what one engine has saved, every engine of the same identity finds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvoffload.cache import AcquiredBlocks, Ask, CacheGeometry, CacheGroup, EntryKey, Publication, ReservedSlots
from kvoffload.client import (
    Client,
    ClientSettings,
    LinkSettings,
    Member,
    PromptNote,
    TierWait,
    add_report_text,
    describe_blocks,
)
from kvoffload.keys.block_hash import BlockHasher
from kvoffload.protocol import Miss, Role
from kvoffload.transfer import CopyDirection
from kvoffload.types import Fingerprint
from mini_engine.kv_cache import CacheConfig, KVCache
from mini_engine.model import ModelConfig
from mini_engine.offload import Move, Registrar

DEADLINE_S = 5.0
"""An example may wait; an engine that serves people has 50 ms."""
STOCK_SLOTS = 64
"""Of each group, held ready: as many blocks as a step of the mini engine fills."""


def identify(model: ModelConfig, config: CacheConfig) -> Fingerprint:
    """Everything that the bytes of a block depend on. The number of blocks is nothing of that."""
    facts = {"model": asdict(model), "cache": asdict(config) | {"blocks": 0}}
    return Fingerprint(hashlib.sha256(repr(sorted(facts.items())).encode()).digest())


class SharedStore(Registrar):
    """A client of the server at `socket`. Without a server nothing is found and nothing is kept."""

    def __init__(self, socket: Path, model: ModelConfig, config: CacheConfig) -> None:
        super().__init__()
        self._socket = socket
        self._fingerprint = identify(model, config)
        self._held: dict[EntryKey, int] = {}
        """Where leased records lie in this process."""
        self._leases: list[AcquiredBlocks] = []
        self._saving: list[tuple[ReservedSlots, bytes, bytes]] = []

    def register(self, cache: KVCache) -> None:
        super().register(cache)
        self._chunk_tokens = cache.chunk_tokens
        groups = tuple(
            CacheGroup(rule=rule, record_bytes=size) for rule, size in zip(cache.rules, self.record_bytes, strict=True)
        )
        hash_block_size = cache.geometry.hash_block_size
        blocks = describe_blocks(
            self._fingerprint,
            CacheGeometry(hash_block_size=hash_block_size, groups=groups),
            hash_algorithm=BlockHasher(hash_block_size).algorithm,
        )
        member = Member(engine=f"mini engine {os.getpid()} {id(self):x}", role=Role.SCHEDULER, pid=os.getpid())
        link = LinkSettings(acquire_deadline_s=DEADLINE_S, stock_slots=(STOCK_SLOTS,) * len(groups))
        self.client = Client(
            ClientSettings(
                socket=self._socket,
                member=member,
                register=add_report_text(blocks, str(self.registration.report)),
                link=link,
            )
        ).start()

    def unregister(self) -> None:
        self.client.close()
        super().unregister()

    def bring_up(self, chain: bytes) -> None:
        """From the server's tiers, if it has any; then `has` finds it. The server holds it for a moment."""
        if self.client.has_tiers:
            found = self.client.acquire(Ask(chain), far=TierWait(wait_s=DEADLINE_S))
            if found.lease is not None:
                self.client.release(found.lease)

    def note_prompt(self, chain: bytes, tokens: int, *, local: int, boundary: int, saved_s: float) -> None:
        """The server counts it, and knows why what is missing is missing."""
        limit = (tokens - 1) // self._chunk_tokens * self._chunk_tokens
        miss = Miss.TOO_SHORT if boundary == limit else Miss.NEVER_SEEN
        self.client.note_prompt(
            PromptNote(
                chain=chain,
                local=local,
                tokens=tokens,
                boundary=boundary,
                limit=limit,
                saved_us=round(1e6 * saved_s),
                miss=miss,
            )
        )

    def has(self, key: EntryKey) -> bool:
        """Looked up in the server's own index, which is mapped here: no message."""
        return bool(self.client.lookup(key.group, key.block_hash).all())

    def hold(self, keys: Sequence[EntryKey]) -> bool:
        """Whether all of them can be loaded, until `load` or `let_go`."""
        for group in sorted({key.group for key in keys}):
            names = [key for key in keys if key.group == group]
            found = self.client.acquire_entries(group, b"".join(key.block_hash for key in names))
            if found.lease is None:
                self.let_go()
                return False
            self._leases.append(found)
            memory = self.client.memory(found.lease.memory_id)
            pointers = memory.pointers(found.groups[0].addresses, self.record_bytes[group])
            self._held.update(zip(names, pointers.tolist(), strict=True))
        return True

    def let_go(self) -> None:
        for found in self._leases:
            assert found.lease is not None
            self.client.release(found.lease)
        self._leases.clear()
        self._held.clear()

    def load(self, moves: Sequence[Move]) -> None:
        """All of them are there when it returns; they are held."""
        self.submit(CopyDirection.LOAD, moves, [self._held[move.key] for move in moves])
        self.wait()
        self.let_go()

    def save(self, moves: Sequence[Move]) -> None:
        """Begins to save what is not there yet, as far as there is room. Ends with `wait`."""
        for group, size in enumerate(self.record_bytes):
            mine = [move for move in moves if move.key.group == group]
            names = b"".join(move.key.block_hash for move in mine)
            present = self.client.lookup(group, names)
            new = [move for move, is_there in zip(mine, present, strict=True) if not is_there]
            slots = self.client.take(group, len(new))
            if len(slots) < len(new):
                # Too few were held ready. An engine that serves people would save less instead of waiting.
                self.client.abort(slots)
                slots = self.client.reserve(group, count=len(new))
            new = new[: len(slots)]
            if not new:
                continue
            pointers = self.client.memory(slots.memory_id).pointers(slots.addresses, size)
            self.submit(CopyDirection.SAVE, new, pointers.tolist())
            hashes = b"".join(move.key.block_hash for move in new)
            self._saving.append((slots, hashes, b"".join(move.parent for move in new)))

    def wait(self) -> None:
        """Waits until all copies have ended, and publishes the saved blocks."""
        super().wait()
        for slots, hashes, parents in self._saving:
            self.client.publish(Publication(slots, hashes=hashes, parents=parents))
        self._saving.clear()
