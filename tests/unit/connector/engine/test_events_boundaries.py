"""For a hybrid model, events name the blocks that can be loaded: a router that counts leading blocks counts as many as
the server finds."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_events import BlockStored

from kvoffload.cache import CacheGeometry
from kvoffload.client.inventory import PAUSE_NS, Inventory
from kvoffload.client.lanes import Pending
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.engine.events import CacheEvents
from kvoffload.protocol import EventsLost, ListBlocks, NamespaceOpened, Subscribe
from kvoffload.protocol.survey import FindPrefix
from kvoffload.server import ServerLimits
from kvoffload.server.sessions.outbox import ToConnection
from tests.kit.cache.cache_model import HYBRID, PLAIN, fingerprint, make_chain
from tests.kit.connector.facts import group_facts
from tests.kit.connector.told_events import take, told
from tests.kit.server.chains import save_chain
from tests.kit.server.harness import Server, core_settings


@pytest.mark.parametrize("geometry", [PLAIN, HYBRID], ids=["full attention", "with windows and states"])
@pytest.mark.parametrize("seed", range(3))
def test_a_router_that_counts_leading_blocks_counts_what_the_server_would_find(
    geometry: CacheGeometry, seed: int
) -> None:
    """Over a history of saves, evictions, lost blocks and losses of events, from a pool that was there first."""
    random = Random(seed)
    rules = [group.rule for group in geometry.groups]
    groups = [
        group_facts(at, rule.reuse, block_size=rule.block_size, window=rule.window) for at, rule in enumerate(rules)
    ]
    table = GroupTable(groups, hash_block_size=16, alignment=16)
    events = CacheEvents(fingerprint("model"), table)
    chains = [make_chain(prompt, 12) for prompt in range(5)]
    settings = core_settings(operator_uids=frozenset({0}))
    with Server(settings=settings, limits=ServerLimits(listed_blocks=7, queued_events=8)) as server:
        engine = server.process().join(geometry)
        operator = server.process("operator", uid=0).watch()
        save_chain(server.cache, engine, chains[0], geometry)
        router = server.process("router").watch()
        router.ask(Subscribe())
        known: set[Any] = set()
        link = Inventory(events.hear)
        clock_ns = itertools.count(step=PAUSE_NS)

        def catch_up() -> None:
            for _ in range(20):
                server.core.tick()
                for event, number in server.core.feed.take(router.key, 100):
                    events.hear(event, number)
                    if isinstance(event, EventsLost):
                        link.begin((engine.name_space,))
                link.go_on(next(clock_ns), ask)
            for event in take(events):
                if isinstance(event, BlockStored):
                    known.update(event.block_hashes)
                else:
                    known.difference_update(event.block_hashes)

        def ask(message: ListBlocks) -> Pending:
            pending = Pending(message=message, deadline_ns=2**62, sent_ns=0)
            assert router.ask(message) is None
            (sent,) = server.core.advance(server.now_ns)
            assert isinstance(sent, ToConnection)
            pending.end(sent.message)
            return pending

        events.hear(NamespaceOpened(name_space=engine.name_space, fingerprint=fingerprint("model")), 0)
        link.begin((engine.name_space,))
        for _ in range(30):
            match random.randrange(4):
                case 0 | 1:
                    save_chain(server.cache, engine, random.choice(chains)[: 32 * random.randrange(1, 13)], geometry)
                case 2:
                    at = 32 * random.randrange(12)
                    group = random.randrange(len(rules))
                    server.cache.invalidate(engine.name_space, group, random.choice(chains)[at : at + 32])
                case _:
                    server.cache.evict(random.randrange(1, 200_000))
            if random.random() < 0.5:
                continue
            catch_up()
            for chain in chains:
                names = [told(chain[at : at + 32]) for at in range(0, len(chain), 32)]
                overlap = next((at for at, name in enumerate(names) if name not in known), len(names))
                found = operator.ask(FindPrefix(name_space=engine.name_space, chain=chain))
                assert found.in_memory == 16 * overlap
