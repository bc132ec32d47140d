"""The map of a cluster: which node has which keys."""

from __future__ import annotations

import binascii
from bisect import bisect_right
from dataclasses import dataclass

from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import Answer

NODE_LIMIT = 1 << 10
"""The most nodes of a cluster."""
SLOTS = 1 << 14

_NONSENSE = "it does not speak as it should: slots without nodes"

Node = tuple[str, int]
"""Host and port."""


def slot_of(key: bytes) -> int:
    """Returns the slot of a key: of its part in braces, if there is one. Our own keys may have some by accident."""
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1) if begin >= 0 else -1
    return binascii.crc_hqx(key[begin + 1 : end] if end > begin + 1 else key, 0) % SLOTS


@dataclass(frozen=True)
class SlotMap:
    """Ranges of the slots, in their order, and the node that owns each."""

    firsts: tuple[int, ...]
    lasts: tuple[int, ...]
    owners: tuple[Node, ...]
    nodes: tuple[Node, ...]
    """All nodes, replicas included."""

    @property
    def primaries(self) -> tuple[Node, ...]:
        return tuple(sorted(set(self.owners)))

    def find(self, slot: int) -> Node:
        """Returns the node that has a slot. StoreFaultError: no node has it."""
        at = bisect_right(self.firsts, slot) - 1
        if at < 0 or slot > self.lasts[at]:
            raise StoreFaultError(f"the cluster has no node for slot {slot}")
        return self.owners[at]


def read_slots(answer: Answer, asked: Node) -> SlotMap:
    """Reads the answer to CLUSTER SLOTS, from the node that was asked. StoreFaultError: it makes no sense."""
    parts: list[tuple[int, int, Node]] = []
    nodes: set[Node] = {asked}
    for part in answer if isinstance(answer, list) else []:
        match part:
            case [int(first), int(last), list(primary), *replicas]:
                owner = _read_node(primary, asked)
                parts.append((first, last, owner))
                nodes |= {owner, *(_read_node(node, asked) for node in replicas)}
            case _:
                raise StoreFaultError(_NONSENSE)
    if not parts or len(nodes) > NODE_LIMIT:
        raise StoreFaultError(f"a cluster of {len(nodes)} nodes with {len(parts)} parts of slots")
    parts.sort()
    return SlotMap(
        firsts=tuple(first for first, _, _ in parts),
        lasts=tuple(last for _, last, _ in parts),
        owners=tuple(node for _, _, node in parts),
        nodes=tuple(sorted(nodes)),
    )


def _read_node(node: Answer, asked: Node) -> Node:
    """A node that does not know its own address has none to tell."""
    match node:
        case [bytes(host), int(port), *_] if host not in (b"", b"?"):
            return host.decode(errors="replace"), port
        case [_, int(port), *_]:
            return asked[0], port
    raise StoreFaultError(_NONSENSE)
