"""An engine of numpy alone: attention over a cache of a few blocks, and a cache server for what it has lost.

The mini engine shows how an engine with torch hands its memory to the copy engine; this one copies by itself.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.cache import Ask, CacheGeometry, CacheGroup, GroupRule, Publication
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
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import IdentityField, Miss, Role
from kvoffload.types import HASH_BYTES, Fingerprint

BLOCK_TOKENS, LAYERS, WIDTH, VOCABULARY = 16, 3, 64, 512
OWN_BLOCKS = 32
"""Number of blocks that the engine caches itself."""
DEADLINE_S = 5.0
"""An example may wait; an engine that serves people has 50 ms."""

Floats = npt.NDArray[np.float32]
RECORD = (LAYERS, 2, BLOCK_TOKENS, WIDTH)
"""A block's keys and values, by layer."""
RECORD_BYTES = 4 * LAYERS * 2 * BLOCK_TOKENS * WIDTH


class Answer(NamedTuple):
    """The answer to a prompt: the logits of its next token, and how much of the prompt had not to be computed."""

    logits: Floats
    reused: int
    restored_blocks: int


class Model:
    """Decoder layers of attention alone, of random weights that are the same each time."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        scale = WIDTH**-0.5
        self._embedding = random.standard_normal((VOCABULARY, WIDTH), np.float32)
        self._layers = random.standard_normal((LAYERS, 3, WIDTH, WIDTH), np.float32) * scale

    def compute(self, tokens: list[int], before: list[Floats]) -> tuple[Floats, Floats]:
        """Up to a block's tokens that follow full blocks: their keys and values, and the logits behind the last one.

        Sums are rounded the same way whether the blocks before were computed or restored.
        """
        end = len(before) * BLOCK_TOKENS + len(tokens)
        positions = np.arange(end - len(tokens), end, dtype=np.float32)
        x = self._embedding[tokens] + np.sin(positions[:, None] / np.arange(1, WIDTH + 1, dtype=np.float32))
        made = np.zeros((LAYERS, 2, len(tokens), WIDTH), np.float32)
        mask = np.where(np.arange(end) <= positions[:, None], np.float32(0), np.float32(-np.inf))
        for layer, (query, key, value) in enumerate(self._layers):
            made[layer] = x @ key, x @ value
            keys, values = np.concatenate([*(block[layer] for block in before), made[layer]], axis=1)
            scores = (x @ query) @ keys.T * np.float32(WIDTH**-0.5) + mask
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            x = x + weights / weights.sum(axis=1, keepdims=True) @ values
        return made, x[-1] @ self._embedding.T


class SmallEngine:
    """One thread. Without a server, or before it is served, it computes what its own cache has not."""

    def __init__(self, socket: Path | None) -> None:
        """`socket`: the server's; None for an engine that has none."""
        self._model, self._hasher = Model(), BlockHasher(BLOCK_TOKENS)
        self._own: OrderedDict[bytes, Floats] = OrderedDict()
        self.client = None if socket is None else Client(self._settings(socket)).start()
        self._is_told = threading.Event()
        """It is set once the server has heard of the last prompt."""
        self._is_told.set()
        self._computing_s, self._computed_tokens = 0.0, 0
        """Time and tokens of computing so far, which give the time that a restored token would have taken."""

    def _settings(self, socket: Path) -> ClientSettings:
        rule = GroupRule(block_size=BLOCK_TOKENS, reuse=ReuseRule.PREFIX)
        geometry = CacheGeometry(
            hash_block_size=BLOCK_TOKENS, groups=(CacheGroup(rule=rule, record_bytes=RECORD_BYTES),)
        )
        # Everything that the bytes of a block depend on.
        facts = Fingerprint(hashlib.sha256(repr(("small engine", 1, RECORD, VOCABULARY)).encode()).digest())
        blocks = describe_blocks(
            facts,
            geometry,
            hash_algorithm=self._hasher.algorithm,
            identity=(IdentityField(name="model", value="small engine"),),
        )
        return ClientSettings(
            socket=socket,
            member=Member(engine=f"small engine {os.getpid()}", role=Role.SCHEDULER, pid=os.getpid()),
            register=add_report_text(blocks, f"{LAYERS} layers of attention, {RECORD_BYTES} bytes a block"),
            link=LinkSettings(acquire_deadline_s=DEADLINE_S),
        )

    def close(self) -> None:
        if self.client is not None:
            self._is_told.wait(DEADLINE_S)
            self.client.close()

    def run(self, prompt: list[int]) -> Answer:
        """The last token is always computed: what follows from it is the answer."""
        names = self._hasher.hash_blocks(prompt, parent=self._hasher.root())
        usable = (len(prompt) - 1) // BLOCK_TOKENS
        blocks = self._take_own(names[:usable])
        local = len(blocks)
        blocks += self._restore(prompt, names[:usable], local)
        reused = len(blocks)
        begun = time.perf_counter()
        for at in range(reused * BLOCK_TOKENS, len(prompt), BLOCK_TOKENS):
            made, logits = self._model.compute(prompt[at : at + BLOCK_TOKENS], blocks)
            if made.shape == RECORD:
                blocks.append(made)
        self._computing_s += time.perf_counter() - begun
        self._computed_tokens += len(prompt) - reused * BLOCK_TOKENS
        self._save(names, blocks, reused)
        self._keep_own(names, blocks)
        return Answer(logits, reused * BLOCK_TOKENS, reused - local)

    def _take_own(self, names: list[bytes]) -> list[Floats]:
        taken: list[Floats] = []
        for name in names:
            if name not in self._own:
                break
            taken.append(self._own[name])
        return taken

    def _keep_own(self, names: list[bytes], blocks: list[Floats]) -> None:
        """Keeps blocks from the end on: those kept first are dropped first, and a prefix is worth most."""
        for name, block in reversed(list(zip(names, blocks, strict=True))):
            self._own[name] = block
            self._own.move_to_end(name)
        while len(self._own) > OWN_BLOCKS:
            self._own.popitem(last=False)

    def _restore(self, prompt: list[int], names: list[bytes], local: int) -> list[Floats]:
        """Copies what the server has of the blocks behind the first `local` ones, while they are leased."""
        if self.client is None:
            return []
        chain = b"".join(names)
        limit, boundary = len(names) * BLOCK_TOKENS, local * BLOCK_TOKENS
        restored: list[Floats] = []
        if local < len(names):
            far = TierWait(wait_s=DEADLINE_S) if self.client.has_tiers else None
            found = self.client.acquire(Ask(chain, local=boundary), far=far)
            if found.lease is not None:
                boundary = found.boundary
                memory = self.client.memory(found.lease.memory_id)
                views = [memory.view(address, RECORD_BYTES) for address in found.groups[0].addresses.tolist()]
                restored = [view.view(np.float32).reshape(RECORD).copy() for view in views]
                self.client.release(found.lease)
        token_s = self._computing_s / max(self._computed_tokens, 1)
        miss = Miss.TOO_SHORT if boundary == limit else Miss.NEVER_SEEN
        self._is_told = threading.Event()
        note = PromptNote(
            chain=chain,
            local=local * BLOCK_TOKENS,
            tokens=len(prompt),
            boundary=boundary,
            limit=limit,
            miss=miss,
            saved_us=round(1e6 * token_s * (boundary - local * BLOCK_TOKENS)),
            on_explained=lambda _, is_told=self._is_told: is_told.set(),
        )
        self.client.note_prompt(note)
        return restored

    def _save(self, names: list[bytes], blocks: list[Floats], first: int) -> None:
        """The blocks from the first that was computed, as far as the server has room for them."""
        count = len(blocks) - first
        if self.client is None or not count:
            return
        slots = self.client.reserve(0, count=count)
        if len(slots) < count:
            self.client.abort(slots)
            return
        memory = self.client.memory(slots.memory_id)
        for block, address in zip(blocks[first:], slots.addresses.tolist(), strict=True):
            memory.view(address, RECORD_BYTES).view(np.float32)[:] = block.ravel()
        hashes = b"".join(names[first : first + count])
        parents = (names[first - 1] if first else bytes(HASH_BYTES)) + hashes[:-HASH_BYTES]
        self.client.publish(Publication(slots, hashes=hashes, parents=parents))
