"""The kinds of remote behind a node's memory: none, a store for all, homes by hash, or the memory of other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.fleets.node import Node, flags, prefix
from benchmarks.fleets.wire import Wire
from benchmarks.fleets.workload import Blocks, Workload
from kvoffload import native
from kvoffload.tiers.homes import find_homes


@dataclass(frozen=True, eq=False)
class Part:
    """Blocks that lie at one end of the fleet's network. `wire`: by which it sends them; None: it is the reader."""

    memory: native.ReplayMemory
    wire: Wire | None
    blocks: Blocks


@dataclass(frozen=True, eq=False)
class Found:
    """The first `count` of the blocks that were asked for; `parts` are read from the remote."""

    count: int
    parts: list[Part]
    questions: int


class Remote(Protocol):
    def look(self, node: Node, rest: Blocks, local: npt.NDArray[np.bool_]) -> Found:
        """`local`: which ones the node's own memory has anyway."""
        ...

    def targets(self, node: Node, blocks: Blocks) -> list[Part]:
        """Where they go that were computed. What is there already is not sent, but counts as used."""
        ...

    def use(self, blocks: Blocks) -> None:
        """A request makes use of these, wherever they are."""
        ...

    def change(self, nodes: Sequence[Node]) -> None:
        """Nodes came or went."""
        ...


class NoRemote:
    def look(self, node: Node, rest: Blocks, local: npt.NDArray[np.bool_]) -> Found:
        return Found(0, [], 0)

    def targets(self, node: Node, blocks: Blocks) -> list[Part]:
        return []

    def use(self, blocks: Blocks) -> None:
        pass

    def change(self, nodes: Sequence[Node]) -> None:
        pass


class SharedStore:
    """One place that all nodes write to and read from; it survives them."""

    def __init__(self, memory: native.ReplayMemory, bytes_per_s: float) -> None:
        self.memory = memory
        self.wire_out, self.wire_in = Wire(bytes_per_s), Wire(bytes_per_s)

    def look(self, node: Node, rest: Blocks, local: npt.NDArray[np.bool_]) -> Found:
        count = prefix(flags(self.memory, rest) | local)
        wanted = rest[:count][~local[:count]]
        return Found(count, [Part(self.memory, self.wire_out, wanted)] if len(wanted) else [], 1)

    def targets(self, node: Node, blocks: Blocks) -> list[Part]:
        self.memory.touch(blocks)
        missing = blocks[~flags(self.memory, blocks)]
        return [Part(self.memory, self.wire_in, missing)] if len(missing) else []

    def use(self, blocks: Blocks) -> None:
        self.memory.touch(blocks)

    def change(self, nodes: Sequence[Node]) -> None:
        pass


class Homes:
    """Each record has one home among the nodes, by the real rule. `memories`: what each node gives to the fleet; the
    node's own memory, or a part that is set aside."""

    def __init__(
        self, work: Workload, nodes: Sequence[Node], memories: list[native.ReplayMemory], keys: Blocks
    ) -> None:
        """`keys`: by block, the block whose hash decides."""
        self._numbers = {f"node-{node.number}": node.number for node in nodes}
        self._key_hashes = work.hashes_of(keys)
        self._nodes = nodes
        self.memories = memories
        self.change(nodes)

    def change(self, nodes: Sequence[Node]) -> None:
        members = tuple(sorted(f"node-{node.number}" for node in nodes if node.is_up))
        numbers = np.array([self._numbers[member] for member in members])
        self.homes = numbers[find_homes(members, self._key_hashes)]

    def look(self, node: Node, rest: Blocks, local: npt.NDArray[np.bool_]) -> Found:
        present = local.copy()
        homes = self.homes[rest]
        asked = np.unique(homes[~local])
        for home in asked:
            places = (homes == home) & ~local
            present[places] = flags(self.memories[home], rest[places])
        count = prefix(present)
        wanted = rest[:count][~local[:count]]
        parts = [Part(self.memories[home], self._way(node, home, out=True), part) for home, part in self._split(wanted)]
        return Found(count, parts, int((asked != node.number).sum()))

    def targets(self, node: Node, blocks: Blocks) -> list[Part]:
        parts = []
        for home, part in self._split(blocks):
            memory = self.memories[home]
            if memory is node.memory:
                continue
            memory.touch(part)
            missing = part[~flags(memory, part)]
            if len(missing):
                parts.append(Part(memory, self._way(node, home, out=False), missing))
        return parts

    def use(self, blocks: Blocks) -> None:
        for home, part in self._split(blocks):
            self.memories[home].touch(part)

    def _way(self, node: Node, home: int, *, out: bool) -> Wire | None:
        if home == node.number:
            return None
        return self._nodes[home].link_out if out else self._nodes[home].link_in

    def _split(self, blocks: Blocks) -> list[tuple[int, Blocks]]:
        homes = self.homes[blocks]
        return [(int(home), blocks[homes == home]) for home in np.unique(homes)]


class Peers:
    """Every node keeps what it computed or read, and asks all others for what it lacks."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes

    def look(self, node: Node, rest: Blocks, local: npt.NDArray[np.bool_]) -> Found:
        best, best_count, questions = None, prefix(local), 0
        for other in self._nodes:
            if other is node or not other.is_up:
                continue
            questions += 1
            count = prefix(flags(other.memory, rest) | local)
            if count > best_count:
                best, best_count = other, count
        if best is None:
            return Found(0, [], questions)
        wanted = rest[:best_count][~local[:best_count]]
        return Found(best_count, [Part(best.memory, best.link_out, wanted)], questions)

    def targets(self, node: Node, blocks: Blocks) -> list[Part]:
        return []

    def use(self, blocks: Blocks) -> None:
        pass

    def change(self, nodes: Sequence[Node]) -> None:
        pass
