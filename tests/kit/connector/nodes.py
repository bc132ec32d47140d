"""The servers of several nodes without their engine: one client for each, and steps that carry what they tell."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from kvoffload.cache import AcquiredBlocks, Ask, Publication
from kvoffload.client import PendingAcquire
from kvoffload.connector.common.orders import NodeReport
from kvoffload.connector.common.step_plan import GroupFacts, StepPlan
from kvoffload.connector.identity.agreement import SharingSettings, make_register, name_node
from kvoffload.connector.nodes.all_nodes import AllNodes
from kvoffload.connector.nodes.node_proxy import NodeProxy
from kvoffload.connector.nodes.other_node import OtherNode
from kvoffload.types import HASH_BYTES
from tests.kit.connector.facts import group_facts
from tests.kit.connector.local_client import STOCK, LocalClient, StockedClient

SLOTS = STOCK
BLOCK = 4
MAX_STEPS = 10


class Nodes:
    """An engine with two ranks on each of so many nodes. Every step is heard of unless a test says otherwise."""

    def __init__(self, nodes: int = 2, groups: tuple[GroupFacts, ...] = (group_facts(0),)) -> None:
        self.now_s = 100.0
        self.sharing = SharingSettings(
            hash_block_size=BLOCK, hash_algorithm="sha256", hash_seed="0", tensor_ranks=2 * nodes, nodes=nodes
        )
        self.groups = groups
        self.clients = [
            StockedClient(make_register(name_node(b"f" * 32, node, nodes), groups, self.sharing))
            for node in range(nodes)
        ]
        self.proxies = [NodeProxy(client, groups=len(groups)) for client in self.clients[1:]]
        self.others = [OtherNode(groups=len(groups), clock=lambda: self.now_s) for _ in self.proxies]
        self.cache = AllNodes(
            self.clients[0],
            self.others,
            hash_block_size=BLOCK,
            node_shards=self.sharing.count_node_rows(groups),
            clock=lambda: self.now_s,
        )
        self.cache.hear({node: proxy.begin() for node, proxy in enumerate(self.proxies, 1)})

    def step(self, plan: StepPlan | None = None) -> StepPlan:
        """Takes one step of the engine: the nodes are told, and answer with its end."""
        plan, reports = self.tell(plan)
        self.cache.hear(reports)
        return plan

    def tell(self, plan: StepPlan | None = None) -> tuple[StepPlan, dict[int, NodeReport]]:
        """Takes the first half of it, and returns what is going to be heard."""
        plan = self.cache.complete(plan or StepPlan())
        reports = {}
        for node, proxy in enumerate(self.proxies, 1):
            if node in plan.nodes:
                proxy.obey(plan.nodes[node])
            report = proxy.report(is_idle=True)
            if report is not None:
                reports[node] = report
        return plan, reports

    def settle(self) -> int:
        """Runs steps until no node waits for an answer, and returns their number."""
        for steps in range(MAX_STEPS):
            if not self.cache.is_asking:
                return steps
            self.step()
        raise AssertionError("a node is asking for ever")

    def save(self, chain: bytes, *, group: int = 0, blocks: range | None = None) -> bool:
        """Publishes blocks of a chain on all nodes."""
        shards = self.sharing.nodes * self.sharing.shards_of(self.groups[group])
        return self.cache.publish(make_publication(self.cache, chain, group=group, blocks=blocks, shards=shards))

    def save_on(self, node: int, chain: bytes, *, group: int = 0, blocks: range | None = None) -> None:
        """Saves on one node alone, as if the save was cut off between the nodes."""
        publication = make_publication(self.clients[node], chain, group=group, blocks=blocks, shards=2)
        assert self.clients[node].publish(publication)

    def ask(self, chain: bytes, *, shards: int = 0) -> AcquiredBlocks:
        """Asks until there is an answer."""
        pending = self.cache.start_acquire(Ask(chain, alignment=BLOCK, shards=range(shards)))
        return self.wait(pending)

    def wait(self, pending: PendingAcquire) -> AcquiredBlocks:
        for _ in range(MAX_STEPS):
            found = self.cache.poll(pending)
            if found is not None:
                return found
            self.step()
        raise AssertionError("there is no answer")

    @property
    def leases(self) -> list[int]:
        return [client.stats().leases for client in self.clients]


def make_chain(seed: int, blocks: int) -> bytes:
    return b"".join(sha256(f"{seed}.{block}".encode()).digest() for block in range(blocks))


def make_publication(
    cache: AllNodes | LocalClient, chain: bytes, *, group: int = 0, blocks: range | None = None, shards: int = 4
) -> Publication:
    """All blocks of a chain, or some; digests count up, shard after shard."""
    names = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
    parents = [bytes(HASH_BYTES), *names]
    chosen = list(blocks if blocks is not None else range(len(names)))
    slots = cache.take(group, len(chosen))
    assert len(slots) == len(chosen)
    return Publication(
        slots,
        hashes=b"".join(names[at] for at in chosen),
        parents=b"".join(parents[at] for at in chosen),
        digests=np.arange(1, 1 + shards * len(chosen), dtype=np.uint64),
        shards=shards,
    )
