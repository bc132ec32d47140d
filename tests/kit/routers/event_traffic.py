"""A random history of an engine's prompts in a real server, and what the server's events make of it for routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest

from kvoffload.cache import Ask, CacheSettings, Publication
from kvoffload.connector.common.block_chain import NO_MASK, BlockChain
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.engine.events import CacheEvents
from kvoffload.connector.engine.vllm_compat import GroupKind
from kvoffload.protocol.survey import FindPrefix, IdentityRead, PrefixFound, ReadIdentity
from tests.kit.cache.cache_model import fingerprint
from tests.kit.connector.facts import group_facts
from tests.kit.routers.dynamo_indexer import SALT_PREFIX
from tests.kit.routers.publisher import Publisher
from tests.kit.server.tiers import await_that
from tests.kit.web.vllm_blocks import BLOCK, engine, name_blocks

MODEL = "made-up/model"
SMALL = CacheSettings(memory_bytes=2 << 20, segment_bytes=1 << 20, extent_bytes=16 << 10)
"""For 512 blocks or so."""
ADAPTER_MASK = bytes(range(1, 33))
GROUPS = GroupTable([group_facts(0, block_size=BLOCK)], hash_block_size=BLOCK, alignment=BLOCK)


@dataclass(eq=False)
class Prompt:
    """A request's prompt: its tokens, and the other values that its blocks' names depend on."""

    tokens: list[int]
    salt: str = ""
    adapter: str = ""
    chain: BlockChain = field(init=False)

    def __post_init__(self) -> None:
        salt = SALT_PREFIX + self.salt if self.salt else self.adapter
        names = name_blocks(self.tokens, salt=salt)
        # Blocks of an adapter have other names in the pool than in the engine.
        self.chain = BlockChain(GROUPS, ADAPTER_MASK if self.adapter else NO_MASK)
        self.chain.follow([names[at : at + 32] for at in range(0, len(names), 32)])

    @property
    def tracked(self) -> Any:
        """The request that saves the prompt, as `CacheEvents` sees it."""
        request = SimpleNamespace(
            all_token_ids=self.tokens,
            lora_request=LoRARequest(self.adapter, 3, "/adapter") if self.adapter else None,
            cache_salt=SALT_PREFIX + self.salt if self.salt else None,
            mm_features=[],
            prompt_embeds=None,
            session_id=None,
        )
        return SimpleNamespace(request=request, settings=SimpleNamespace(tenant=""), chain=self.chain)

    def __len__(self) -> int:
        return len(self.tokens) // BLOCK


class EventTraffic:
    """One engine's prompts, saved, used and found to be broken, in a server whose memory is too small for them."""

    def __init__(self, socket: Path, seed: int) -> None:
        self._random = Random(seed)
        self._roots = [
            Prompt(self._make_tokens(6), **{"salt": {"salt": "own"}, "adapter": {"adapter": "poet"}}.get(kind, {}))
            for kind in ("", "", "salt", "adapter")
        ]
        self.prompts = list(self._roots)
        self.events = CacheEvents(fingerprint(MODEL), GROUPS, kinds=[GroupKind("full_attention", None)])
        self._socket = socket

    @contextmanager
    def joined(self) -> Iterator[None]:
        with engine(self._socket, MODEL, on_event=self.events.hear) as self.client:
            self.client.subscribe(with_inventory=True)
            self.events.start(self.client.take_inventory)
            try:
                yield
            finally:
                self.events.close()

    def turn(self) -> None:
        """One request, or one block that is found to be broken."""
        prompt = self._random.choice(self.prompts)
        kind = self._random.random()
        if kind < 0.6:
            self._save(self._go_on(prompt))
        elif kind < 0.9:
            self.client.release(self.client.acquire(Ask(prompt.chain.data)).lease)
        else:
            place = self._random.randrange(len(prompt))
            self.client.invalidate(0, prompt.chain.names(0, range(place, place + 1)))

    def count_hits(self, prompt: Prompt) -> int:
        """Counts the tokens of a prompt that the server has."""
        [read] = [self.client.look_into(ReadIdentity(place=0))]
        assert isinstance(read, IdentityRead)
        found = self.client.look_into(FindPrefix(name_space=read.name_space, chain=prompt.chain.data))
        assert isinstance(found, PrefixFound)
        return found.in_memory

    def _go_on(self, prompt: Prompt) -> Prompt:
        """Another one that begins like it, as far as at any token."""
        kept = prompt.tokens[: self._random.randrange(len(prompt.tokens) + 1)] if len(prompt) < 40 else []
        root = next(root for root in self._roots if (root.salt, root.adapter) == (prompt.salt, prompt.adapter))
        tokens = (kept or root.tokens) + self._make_tokens(self._random.randrange(1, 12))
        made = Prompt(tokens, prompt.salt, prompt.adapter)
        self.prompts.append(made)
        return made

    def _make_tokens(self, blocks: int) -> list[int]:
        count = blocks * BLOCK + self._random.randrange(BLOCK)
        return [self._random.randrange(50_000) for _ in range(count)]

    def _save(self, prompt: Prompt) -> None:
        """Saves the blocks of a prompt that the server lacks, in runs."""
        lacking = np.flatnonzero(~self.client.lookup(0, prompt.chain.data))
        for run in np.split(lacking, np.flatnonzero(np.diff(lacking) > 1) + 1) if len(lacking) else []:
            positions = range(int(run[0]), int(run[-1]) + 1)
            slots = self.client.reserve(0, count=len(positions))
            positions = positions[: len(slots)]
            names = prompt.chain.names(0, positions)
            self.events.note_tokens(prompt.tracked, 0, positions, names)
            assert self.client.publish(Publication(slots, hashes=names, parents=prompt.chain.parents(0, positions)))
            await_that(lambda names=names: bool(self.client.lookup(0, names).any()))


def tell(traffic: EventTraffic, publisher: Publisher) -> None:
    """Publishes the events, as the engine does after a step."""
    publisher.publish(traffic.events.take())
