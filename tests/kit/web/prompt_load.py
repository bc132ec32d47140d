"""An engine's traffic without an engine: conversations that grow, are asked for, and are stored."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import numpy as np

from kvoffload.cache import Ask, CacheGeometry, CacheGroup, GroupRule, Publication
from kvoffload.client import (
    Client,
    ClientSettings,
    Member,
    PromptNote,
    TierWait,
    add_report_text,
    describe_blocks,
)
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import IdentityField, Miss, Role
from kvoffload.types import HASH_BYTES
from tests.kit.cache.cache_model import fingerprint, make_chain
from tests.kit.web.vllm_blocks import PATIENT

BLOCK = 16
RECORD_BYTES = 64 << 10
TOKEN_US = 70
GEOMETRY = CacheGeometry(
    hash_block_size=BLOCK,
    groups=(CacheGroup(rule=GroupRule(block_size=BLOCK, reuse=ReuseRule.PREFIX), record_bytes=RECORD_BYTES),),
)


class PromptLoad:
    """Loads a server with one engine's prompts. `turn` is a prompt: asked, told of, and what was missing stored."""

    def __init__(self, socket: Path, *, model: str = "made-up/model-8b", seed: int = 1, tenant: str = "") -> None:
        identity = (IdentityField(name="model", value=model),)
        register = describe_blocks(
            fingerprint(model), GEOMETRY, hash_algorithm="sha256", identity=identity, tenant=tenant
        )
        register = add_report_text(register, "this engine is made up: it has no tensors")
        self.engine = f"{model} {seed}"
        member = Member(engine=self.engine, role=Role.SCHEDULER, pid=os.getpid())
        self.client = Client(ClientSettings(socket=socket, member=member, register=register, link=PATIENT)).start()
        assert self.client.wait_until_served(30), self.client.fault
        self._random = Random(seed)
        self._lengths: dict[int, int] = {}
        self._tokens = 0

    def turn(self, *, conversations: int = 40, session: str = "") -> None:
        """Plays the next turn of a conversation: of an agent, if it names a session."""
        who = self._random.randrange(conversations)
        blocks = self._lengths[who] = min(self._lengths.get(who, 3) + self._random.randint(1, 4), 24)
        chain = make_chain(who, blocks)
        far = TierWait(wait_s=0.5) if self.client.has_tiers else None
        memory_alone = self.client.find_boundary(Ask(chain))
        found = self.client.acquire(Ask(chain), far=far)
        boundary = found.boundary if found.is_hit else 0
        self.client.note_prompt(
            PromptNote(
                chain=chain,
                local=0,
                tokens=blocks * BLOCK + 5,
                boundary=boundary,
                limit=blocks * BLOCK,
                lower=max(boundary - memory_alone, 0),
                saved_us=boundary * TOKEN_US,
                miss=Miss.TOO_SHORT if boundary == blocks * BLOCK else Miss.NEVER_SEEN,
                session=session,
            )
        )
        self._tokens += blocks * BLOCK + 5
        if found.lease is not None:
            self.client.release(found.lease)
        self._store(chain, boundary // BLOCK)

    def await_told(self) -> None:
        """Waits until the server has heard of all prompts."""
        while sum(self.client.insight().outcomes.values()) < self._tokens:
            time.sleep(0.02)

    def close(self) -> None:
        self.client.close()

    def _store(self, chain: bytes, first: int) -> None:
        hashes = chain[first * HASH_BYTES :]
        count = len(hashes) // HASH_BYTES
        slots = self.client.reserve(0, count=count) if count else None
        if slots is None or len(slots) < count:
            if slots is not None:
                self.client.abort(slots)
            return
        memory = self.client.memory(slots.memory_id)
        for address in slots.addresses.tolist():
            memory.view(address, RECORD_BYTES)[:] = np.uint8(address >> 16 & 0xFF)
        before = chain[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else bytes(HASH_BYTES)
        self.client.publish(Publication(slots, hashes=hashes, parents=before + hashes[:-HASH_BYTES]))
