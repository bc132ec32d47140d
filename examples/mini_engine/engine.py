"""The engine: admit requests, prefill in chunks, decode greedily, reuse full blocks. One step serves every request."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvoffload.cache import EntryKey, longest_boundary, needed_blocks
from kvoffload.keys.block_hash import BlockHasher
from mini_engine.kv_cache import CacheConfig, KVCache
from mini_engine.model import Model, ModelConfig
from mini_engine.offload import NO_PARENT, BlockStore, Move

NO_BLOCK = 1 << 40
"""A table's entry without memory. Far out of range, so that using it is an error and not another block's bytes."""


class BlockPool:
    """Block ids with reference counts. Free blocks keep content and name until they are handed out again."""

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.block_of: dict[EntryKey, int] = {}
        self._key_of: dict[int, EntryKey] = {}

    def acquire(self, key: EntryKey) -> int:
        """The block of this name, or NO_BLOCK."""
        block = self.block_of.get(key, NO_BLOCK)
        if block != NO_BLOCK:
            self._references[block] += 1
            self.free.pop(block, None)
        return block

    def release(self, block: int) -> None:
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} was released more often than acquired"
        if self._references[block] == 0:
            self.free[block] = None

    def allocate(self) -> int:
        """The block that has been free for longest. The caller has checked that there is one."""
        block, _ = self.free.popitem(last=False)
        if block in self._key_of:
            del self.block_of[self._key_of.pop(block)]
        self._references[block] = 1
        return block

    def publish(self, block: int, key: EntryKey) -> None:
        """Names a full block. If two requests computed the same one, the first keeps the name."""
        if key not in self.block_of and block not in self._key_of:
            self.block_of[key] = block
            self._key_of[block] = key


@dataclass(eq=False)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int
    generated: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    """Tokens of the prompt whose blocks were in the engine's cache or in the store."""
    restored_blocks: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.generated) == self.max_tokens


class Engine:
    """Owns the model, the pools and the KV memory. One thread."""

    def __init__(self, model: ModelConfig, cache: CacheConfig, device: torch.device, store: BlockStore) -> None:
        self._cache_config, self._device, self._store = cache, device, store
        self._model, self._hasher = Model(model, device), BlockHasher(cache.block_tokens)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._computed_tokens, self._computing_s = 0, 0.0
        self.wake()

    def wake(self) -> None:
        self.cache = KVCache(self._model.config, self._cache_config, self._device)
        self._store.register(self.cache)
        self.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees the KV memory; requests and blocks of the engine's own cache are gone, what the store has is not."""
        self._store.unregister()
        self._running = []
        del self.cache

    def reset_prefix_cache(self) -> None:
        assert not self._running, "blocks are in use"
        pools = [BlockPool(self.cache.num_blocks) for _ in self.cache.groups]
        self._pools = [pools[0]] * len(pools) if self._cache_config.is_overlaid else pools

    def scrub(self) -> None:
        """Garbage everywhere: what is right afterwards was restored."""
        self.reset_prefix_cache()
        for memory in self.cache.allocations.values():
            memory.random_(0, 256)

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Request:
        """ValueError for what can never fit: all that waits is served some day."""
        if not prompt or max_tokens < 1:
            raise ValueError("a request has at least one prompt token and one token to generate")
        request = Request(tuple(prompt), max_tokens)
        # The last generated token is not fed back and needs no room.
        tokens = len(prompt) + max_tokens - 1
        request.tables = [[NO_BLOCK] * -(-tokens // rule.block_size) for rule in self.cache.rules]
        needed = Counter(pool for pool, table in zip(self._pools, request.tables, strict=True) for _ in table)
        blocks, available = max(needed.values()), self.cache.num_blocks
        if blocks > available:
            raise ValueError(f"{tokens} tokens need {blocks} blocks, the cache has {available}")
        self._store.bring_up(self._chain(prompt))
        self._waiting.append(request)
        return request

    def run(self, prompt: Sequence[int], max_tokens: int) -> Request:
        request = self.submit(prompt, max_tokens)
        while not request.is_done:
            self.step()
        return request

    def step(self) -> None:
        """One chunk or one token for each running request, after admitting what fits in order of arrival.

        Full blocks of one request are saved while the next one is computed. No block is handed out again before they
        are: that is for the next step.
        """
        while self._waiting and self._admit(self._waiting[0]):
            self._running.append(self._waiting.popleft())
        for request in self._running:
            self._advance(request)
            if request.is_done:
                self._release(request)
        self._running = [request for request in self._running if not request.is_done]
        self._store.wait()

    def needed_blocks(self, boundary: int) -> list[range]:
        """Per group, positions in a block table without which no request can continue at `boundary`."""
        return [needed_blocks(rule, local=0, boundary=boundary) for rule in self.cache.rules]

    def _chain(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._hasher.hash_blocks(tokens, parent=self._hasher.root()))

    def list_keys(self, tokens: Sequence[int]) -> list[list[EntryKey]]:
        """Keys per group of all full blocks. A larger block is named by the last hash block in it."""
        chain = self._hasher.hash_blocks(tokens, parent=self._hasher.root())
        ratios = [rule.block_size // self._hasher.block_size for rule in self.cache.rules]
        return [[EntryKey(g, name) for name in chain[ratio - 1 :: ratio]] for g, ratio in enumerate(ratios)]

    def _admit(self, request: Request) -> bool:
        """Reuses the longest prefix and reserves all the rest at once, so that a running request never waits."""
        rules, pools, tables, keys = self.cache.rules, self._pools, request.tables, self.list_keys(request.prompt)

        def is_ours(g: int, i: int) -> bool:
            return keys[g][i] in pools[g].block_of

        def is_present(g: int, i: int) -> bool:
            return is_ours(g, i) or self._store.has(keys[g][i])

        # The last prompt token is always computed: its logprobs are the answer. Whole chunks, not blocks, are reused:
        # sums are rounded as in a cold run only if the chunks are the same.
        limit, chunk = len(request.prompt) - 1, self.cache.chunk_tokens
        local = longest_boundary(rules, local=0, limit=limit, is_present=is_ours, alignment=chunk)
        for present in (is_present, is_ours):
            boundary = longest_boundary(rules, local=0, limit=limit, is_present=present, alignment=chunk)
            needed = self.needed_blocks(boundary)
            if self._store.hold([keys[g][i] for g, part in enumerate(needed) for i in part if not is_ours(g, i)]):
                break
        missing = []
        for g, part in enumerate(needed):
            for i in part:
                tables[g][i] = pools[g].acquire(keys[g][i])
            rest = range(boundary // rules[g].block_size, len(tables[g]))
            missing += [(g, i) for i in (*part, *rest) if tables[g][i] == NO_BLOCK]
        if any(count > len(pool.free) for pool, count in Counter(pools[g] for g, _ in missing).items()):
            self._release(request)
            self._store.let_go()
            return False
        restored = []
        for g, i in missing:
            tables[g][i] = pools[g].allocate()
            if i < boundary // rules[g].block_size:
                restored.append(Move(keys[g][i], tables[g][i]))
                pools[g].publish(tables[g][i], keys[g][i])
        self._store.load(restored)
        request.restored_blocks = len(restored)
        request.computed = request.reused = boundary
        saved_s = (boundary - local) * self._computing_s / max(self._computed_tokens, 1)
        self._store.note_prompt(
            self._chain(request.prompt), len(request.prompt), local=local, boundary=boundary, saved_s=saved_s
        )
        return True

    def _advance(self, request: Request) -> None:
        start, tokens = request.computed, [*request.prompt, *request.generated]
        end = min(start + self.cache.chunk_tokens, len(tokens))
        tables = [torch.tensor(request.tables[g], device=self._device) for g in self.cache.group_of_layer]
        begin_s = time.perf_counter()
        logprobs = self._model.forward(tokens[start:end], start, self.cache.pages, tables)
        if end - start > 1:
            # Counts the time of a prompt's tokens only: those that are decoded one by one take longer.
            self._computed_tokens += end - start
            self._computing_s += time.perf_counter() - begin_s
        request.computed = end
        if end == len(tokens):
            request.generated.append(int(logprobs.argmax()))
            request.logprobs.append(logprobs)
        keys, full = self.list_keys(tokens[:end]), []
        for g, rule in enumerate(self.cache.rules):
            for i in range(start // rule.block_size, end // rule.block_size):
                self._pools[g].publish(request.tables[g][i], keys[g][i])
                full.append(Move(keys[g][i], request.tables[g][i], self._parent_of(keys, g, i)))
        self._store.save(full)

    def _parent_of(self, keys: list[list[EntryKey]], g: int, i: int) -> bytes:
        """The block without which this one is of no use: of a window or a state the prefix that ends where it does."""
        if g != self.cache.prefix_group:
            return keys[g][i].block_hash
        return keys[g][i - 1].block_hash if i else NO_PARENT

    def _release(self, request: Request) -> None:
        """From the end: what is freed first is reused first, and a prefix is worth more than what follows it."""
        for pool, table in zip(self._pools, request.tables, strict=True):
            for i in reversed(range(len(table))):
                if table[i] != NO_BLOCK:
                    pool.release(table[i])
                    table[i] = NO_BLOCK
