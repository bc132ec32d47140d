"""A subscriber's inventory: all parts of it, once more after a loss, and no sooner than it may."""

from __future__ import annotations

import numpy as np

from kvoffload.client.inventory import PAUSE_NS, RETRY_NS, Heard, Inventory, InventoryBegun, InventoryEnded
from kvoffload.client.lanes import Pending
from kvoffload.protocol import BlocksListed, Error, ErrorCode, ListBlocks, Medium, ServerMessage, Stored

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
NONE = bytes(32)


class Scene:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.asked: list[ListBlocks] = []
        self.pending: Pending | None = None
        self.now_ns = 0
        self.inventory = Inventory(lambda event, number: self.heard.append(event))

    def ask(self, message: ListBlocks) -> Pending:
        self.asked.append(message)
        self.pending = Pending(message=message, deadline_ns=2**62, sent_ns=self.now_ns)
        return self.pending

    def go_on(self) -> None:
        self.inventory.go_on(self.now_ns, self.ask)

    def begin(self, *name_spaces: int) -> None:
        self.inventory.begin(name_spaces)
        self.go_on()

    def answer(self, answer: ServerMessage | None) -> None:
        assert self.pending is not None
        self.pending.end(answer)
        self.go_on()


def listed(*rows: tuple[int, bytes, bytes], following: int = 0) -> BlocksListed:
    groups, hashes, parents = zip(*rows, strict=True) if rows else ((), (), ())
    return BlocksListed(
        next=following, hashes=b"".join(hashes), parents=b"".join(parents), groups=np.array(groups, "<u8").tobytes()
    )


def stored(name_space: int, group: int, hashes: bytes, parents: bytes) -> Stored:
    return Stored(name_space=name_space, medium=Medium.MEMORY, group=group, hashes=hashes, parents=parents)


def test_all_parts_of_all_identities_are_told_between_a_beginning_and_an_end() -> None:
    scene = Scene()
    scene.begin(7, 8)
    scene.answer(listed((0, A, NONE), (1, A, A), (0, B, A), following=5))
    scene.answer(listed())
    scene.answer(listed((0, C, NONE)))
    assert scene.asked == [
        ListBlocks(name_space=7),
        ListBlocks(name_space=7, first=5),
        ListBlocks(name_space=8),
    ]
    assert scene.heard == [
        InventoryBegun(),
        stored(7, 0, A + B, NONE + A),
        stored(7, 1, A, A),
        stored(8, 0, C, NONE),
        InventoryEnded(),
    ]


def test_nothing_more_is_asked_before_an_answer() -> None:
    scene = Scene()
    scene.begin(7)
    scene.go_on()
    assert len(scene.asked) == 1


def test_who_has_no_identity_is_told_of_nothing() -> None:
    scene = Scene()
    scene.begin()
    assert (scene.heard, scene.asked) == ([InventoryBegun(), InventoryEnded()], [])


def test_after_a_loss_it_begins_anew_but_not_at_once() -> None:
    scene = Scene()
    scene.begin(7)
    scene.answer(listed((0, A, NONE), following=5))
    scene.begin(7)
    assert len(scene.asked) == 2
    scene.now_ns += PAUSE_NS
    scene.go_on()
    assert scene.asked[2:] == [ListBlocks(name_space=7)]
    scene.answer(listed())
    assert scene.heard == [InventoryBegun(), stored(7, 0, A, NONE), InventoryBegun(), InventoryEnded()]


def test_a_part_without_an_answer_is_asked_again() -> None:
    scene = Scene()
    scene.begin(7)
    for answer in (None, Error(code=ErrorCode.BUSY, message="")):
        scene.answer(answer)
        count = len(scene.asked)
        scene.go_on()
        assert len(scene.asked) == count
        scene.now_ns += RETRY_NS
        scene.go_on()
        assert scene.asked[count:] == [ListBlocks(name_space=7)]
    scene.answer(listed())
    assert scene.heard == [InventoryBegun(), InventoryEnded()]


def test_an_identity_that_was_forgotten_has_nothing() -> None:
    scene = Scene()
    scene.begin(7, 8)
    scene.answer(Error(code=ErrorCode.NOT_FOUND, message=""))
    assert scene.asked[1:] == [ListBlocks(name_space=8)]


def test_it_can_be_stopped() -> None:
    scene = Scene()
    scene.begin(7)
    scene.inventory.stop()
    scene.answer(listed((0, A, NONE)))
    assert scene.heard == [InventoryBegun()]
