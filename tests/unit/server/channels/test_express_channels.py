"""Express channels of a server, with a real cache behind them and a process's end before them."""

from __future__ import annotations

import array
import contextlib
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvoffload import server
from kvoffload.cache import LocalCache, SessionId
from kvoffload.packets import PacketSocket, refuse_descriptors
from kvoffload.protocol import (
    CODEC,
    Acquire,
    Acquired,
    AcquireEntries,
    Channel,
    Credits,
    CreditsGranted,
    Done,
    Error,
    ErrorCode,
    Invalidate,
    Mark,
    Publish,
    Release,
)
from kvoffload.server.channels import express_channels
from kvoffload.server.channels.express_channels import ExpressChannels
from kvoffload.server.sessions.event_feed import Space
from kvoffload.server.sessions.outbox import OpenExpress
from kvoffload.types import AcquireOutcome
from kvoffload.units import MIB
from tests.kit.cache.cache_model import PLAIN, SMALL, fingerprint, make_chain
from tests.kit.instructions import Instructions
from tests.kit.lingering import lingering
from tests.kit.server.express_peer import ExpressPeer
from tests.kit.server.held_writer import held_writer

SESSION = 0x70005
CHAIN = make_chain(1, 4)
Told = list[tuple[Space, int, bytes, bytes]]


class Served:
    """Channels for one cache, with one namespace to each model."""

    def __init__(self, cache: LocalCache) -> None:
        self.cache = cache
        self.channels = ExpressChannels(boot_id=9)
        self.session: SessionId = cache.open_session()
        cache.add_process(self.session, pid=os.getpid())

    def space(self, model: str = "model") -> Space:
        name_space = self.cache.open_namespace(fingerprint(model), PLAIN)
        return Space(domain="main", name_space=name_space, fingerprint=fingerprint(model))

    def open(
        self, lifeline: int = 1, model: str = "model", session: int = SESSION, owner: str = ""
    ) -> ExpressPeer | None:
        wanted = OpenExpress(lifeline, session, self.session, 0, (), self.space(model), owner)
        end = self.channels.open(wanted, self.cache.core)
        return None if end is None else ExpressPeer(end, session=session)

    def must_open(self, lifeline: int = 1, model: str = "model") -> ExpressPeer:
        peer = self.open(lifeline, model)
        assert peer is not None
        return peer

    def save(self, peer: ExpressPeer, hashes: bytes = CHAIN, model: str = "model") -> None:
        name_space = self.space(model).name_space
        granted = peer.ask(Credits(name_space=name_space, group=0, count=len(hashes) // 32))
        assert isinstance(granted, CreditsGranted)
        parents = (bytes(32) + hashes)[: len(hashes)]
        peer.tell(
            Publish(name_space=name_space, group=0, shard=0, tickets=granted.tickets, hashes=hashes, parents=parents)
        )
        assert peer.ask(Mark()) == Done()

    def acquire(self, peer: ExpressPeer, chain: bytes = CHAIN) -> Acquired:
        answer = peer.ask(Acquire(name_space=self.space().name_space, chain=chain))
        assert isinstance(answer, Acquired)
        return answer

    def take(self) -> tuple[Told, list[int]]:
        told: Told = []
        lost: list[int] = []
        self.channels.take_stored(
            lambda space, stored: told.append((space, *stored)), lambda *gone: told.append(gone), lost.append
        )
        return told, lost

    @property
    def is_ready(self) -> bool:
        return bool(select.select([self.channels.fileno()], [], [], 0)[0])


@pytest.fixture
def served() -> Iterator[Served]:
    with LocalCache.create(SMALL) as cache:
        made = Served(cache)
        yield made
        made.channels.close()


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_blocks_are_served_with_the_sessions_rights(served: Served) -> None:
    peer = served.must_open()
    served.save(peer)
    hit = served.acquire(peer)
    assert (hit.outcome, hit.boundary) == (AcquireOutcome.HIT, 64)
    assert served.cache.stats.leases == 1
    refused = peer.ask(Credits(name_space=served.space("another").name_space, group=0, count=1))
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NOT_FOUND
    peer.tell(Release(leases=np.array([hit.lease], "<u8").tobytes()))
    assert peer.ask(Mark()) == Done()
    assert served.cache.stats.leases == 0


def test_an_ended_channel_serves_nobody_and_others_go_on(served: Served) -> None:
    first, second = served.must_open(1), served.must_open(2)
    served.channels.end(1)
    first.wait_for_end()
    served.channels.end(1)
    served.channels.end(77)
    assert second.ask(Mark()) == Done()


def test_there_are_so_many_and_room_again_when_one_has_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "MAX_CHANNELS", 2)
    served.channels.close()
    served.channels = ExpressChannels(boot_id=9)
    peers = [served.must_open(lifeline) for lifeline in (1, 2)]
    before = count_open()
    assert served.open(3) is None
    assert count_open() == before  # nor is anything of it left
    served.channels.end(1)
    peers[0].wait_for_end()
    while (third := served.open(3)) is None:
        pass  # the thread of the first ends by itself
    assert third.ask(Mark()) == peers[1].ask(Mark()) == Done()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Descriptors for both ends of all channels, as a server gives them to itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * express_channels.MAX_CHANNELS:
        pytest.skip(f"a process may open {hard} files here, which is too few for both ends of all channels")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * express_channels.MAX_CHANNELS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_user_is_served_on_three_quarters_of_them_at_once(many_files: None, served: Served) -> None:
    peers = []
    while (peer := served.open(len(peers), owner="first")) is not None:
        peers.append(peer)
    assert len(peers) == served.channels.limit * 3 // 4
    assert all(peer.ask(Mark()) == Done() for peer in peers)
    other = served.open(len(peers), owner="second")
    assert other is not None
    assert other.ask(Mark()) == Done()


def test_no_user_gets_all(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "MAX_CHANNELS", 4)
    served.channels.close()
    served.channels = ExpressChannels(boot_id=9)
    peers = [served.open(lifeline, owner="first") for lifeline in range(4)]
    assert [peer is not None for peer in peers] == [True] * 3 + [False]
    other = served.open(5, owner="second")
    assert other is not None
    assert other.ask(Mark()) == Done()


def test_opening_one_makes_the_same_work_however_many_there_are(served: Served) -> None:
    counts = []
    for lifeline in range(32):
        spent = Instructions(server)
        with spent.counted():
            assert served.open(lifeline, owner="first") is not None
        counts.append(spent.count)
    assert counts[1] == counts[-1] > 0


def test_a_channel_that_ended_counts_for_no_user(served: Served) -> None:
    served.channels.limit = 4
    for lifeline in range(8):
        assert served.open(lifeline, owner="first") is not None
        served.channels.end(lifeline)
        served.channels.end(lifeline)
    assert [served.open(lifeline, owner="first") is not None for lifeline in range(4)] == [True] * 3 + [False]


def test_what_is_stored_at_once_is_told_in_parts_and_in_order(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "TOLD_BLOCKS", 4)
    monkeypatch.setattr(express_channels, "PART_BLOCKS", 2)
    monkeypatch.setattr(express_channels, "FORGOTTEN_BLOCKS", 1)
    peer, space, names = served.must_open(), served.space(), make_chain(1, 6)
    served.channels.watch_stored(True)
    served.save(peer, names)
    peer.tell(Invalidate(name_space=space.name_space, group=0, hashes=names[: 32 * 3]))
    assert peer.ask(Mark()) == Done()
    turns: list[list[tuple[str, bytes]]] = []
    while not turns or served.channels.has_untold:
        told: list[tuple[str, bytes]] = []
        served.channels.take_stored(
            lambda _, stored, told=told: told.append(("stored", stored.hashes)),  # type: ignore[misc]
            lambda _, __, hashes, told=told: told.append(("forgotten", hashes)),  # type: ignore[misc]
            lambda count: None,
        )
        turns.append(told)
    stored = [("stored", names[at : at + 64]) for at in range(0, 192, 64)]
    forgotten = [("forgotten", names[at : at + 32]) for at in range(0, 96, 32)]
    assert turns == [stored[:2], [stored[2], forgotten[0]], forgotten[1:2], forgotten[2:]]


def test_no_user_gets_all_memory_for_long_messages(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "MAX_MESSAGE_BYTES", 4 * MIB)
    served.channels.close()
    served.channels = ExpressChannels(boot_id=9)
    others = served.open(1, owner="second")
    assert others is not None
    wanted = OpenExpress(2, SESSION, served.session, 0, (), served.space(), "first")
    end = served.channels.open(wanted, served.cache.core)
    assert end is not None
    with socket.socket(fileno=end) as hostile, pytest.raises(OSError):
        hostile.sendall((8 * MIB - 4).to_bytes(4, "little") + bytes(7 * MIB))
    assert others.ask(Mark()) == Done()


def test_without_descriptors_there_is_none(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise OSError("too many open files")

    monkeypatch.setattr("socket.socketpair", fail)
    assert served.open() is None


def test_nothing_is_left_of_a_channel(served: Served) -> None:
    before = count_open()
    for lifeline in range(5):
        peer = served.must_open(lifeline)
        assert peer.ask(Mark()) == Done()
        served.channels.end(lifeline)
        peer.wait_for_end()
    del peer
    served.channels.close()
    assert count_open() == before - 1  # and of the log none either


def test_a_process_that_goes_away_leaves_nothing(served: Served) -> None:
    before = count_open()
    peer = served.must_open(1)
    assert peer.ask(Mark()) == Done()
    del peer
    served.channels.close()
    assert count_open() == before - 1


def test_once_drained_nothing_new_is_taken(served: Served) -> None:
    peer = served.must_open()
    served.save(peer)
    hit = served.acquire(peer)
    name_space = served.space().name_space
    granted = peer.ask(Credits(name_space=name_space, group=0, count=1))
    assert isinstance(granted, CreditsGranted)
    served.channels.start_drain()
    for message in (
        Acquire(name_space=name_space, chain=CHAIN),
        AcquireEntries(name_space=name_space, group=0, hashes=CHAIN),
        Credits(name_space=name_space, group=0, count=1),
    ):
        refused = peer.ask(message)
        assert isinstance(refused, Error)
        assert refused.code is ErrorCode.DRAINING
    assert served.channels.refusals(served.space().domain) == {ErrorCode.DRAINING: 3}
    assert served.channels.refusals("other") == {}
    peer.tell(Release(leases=np.array([hit.lease], "<u8").tobytes()))
    late = make_chain(2, 1)
    peer.tell(Publish(name_space=name_space, group=0, shard=0, tickets=granted.tickets, hashes=late, parents=bytes(32)))
    assert peer.ask(Mark()) == Done()
    assert (served.cache.stats.leases, served.cache.stats.reserved) == (0, 0)
    assert served.cache.lookup(name_space, 0, late).all()
    # A channel that is opened later gets an error, too.
    assert isinstance(served.must_open(2).ask(Credits(name_space=name_space, group=0, count=1)), Error)


def test_what_is_stored_is_told_to_whoever_wants_it(served: Served) -> None:
    first, second = served.must_open(1), served.must_open(2, "another")
    served.save(first)
    assert not served.is_ready
    assert served.take() == ([], [])
    served.channels.watch_stored(True)
    more = make_chain(2, 2)
    served.save(second, more, "another")
    served.save(first, more)
    assert served.is_ready
    parents = (bytes(32) + more)[: len(more)]
    assert served.take() == (
        [(served.space("another"), 0, more, parents), (served.space(), 0, more, parents)],
        [],
    )
    assert not served.is_ready
    served.channels.watch_stored(False)
    served.save(first, make_chain(3, 2))
    assert served.take() == ([], [])


def test_a_session_of_the_same_space_is_the_same_owner(served: Served) -> None:
    served.channels.watch_stored(True)
    for lifeline in (1, 2, 3):
        served.save(served.must_open(lifeline), make_chain(lifeline, 1))
    assert [space for space, *_ in served.take()[0]] == [served.space()] * 3


def test_what_is_beyond_the_log_is_counted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express_channels, "MAX_LOGGED", 5)
    served.channels.close()
    served.channels = ExpressChannels(boot_id=9)
    served.channels.watch_stored(True)
    peer = served.must_open()
    for conversation in (1, 2, 3):
        served.save(peer, make_chain(conversation, 4))
    told, lost = served.take()
    assert ([hashes for _, _, hashes, _ in told], lost) == ([CHAIN], [8])
    served.save(peer, make_chain(4, 4))
    told, lost = served.take()
    assert ([hashes for _, _, hashes, _ in told], lost) == ([make_chain(4, 4)], [])


def test_the_end_ends_all(served: Served) -> None:
    peers = [served.must_open(lifeline) for lifeline in (1, 2)]
    served.channels.close()
    for peer in peers:
        peer.wait_for_end()
    served.channels.close()
    served.channels.watch_stored(False)
    served.channels.end(1)


def test_a_message_of_another_session_ends_the_channel(served: Served) -> None:
    peer = served.must_open()
    peer.session = SESSION + 1
    refused = peer.ask(Mark())
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NO_SESSION
    if peer.goes_on:
        peer.wait_for_end()


@pytest.mark.parametrize("is_refused", [True, False], ids=["as the kernel can", "before Linux 6.16"])
def test_descriptors_that_cannot_be_closed_hold_up_no_other_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """The channel's own thread lets go of what was sent over it, also of what was not read."""
    if not is_refused:
        monkeypatch.setattr(express_channels, "refuse_descriptors", lambda _: False)
    hostile, other = served.must_open(1), served.must_open(2)
    with lingering() as held:
        with held_writer(served.cache.core), socket.socket(fileno=os.dup(hostile.fileno())) as end:
            # The first message waits for the writer. Behind the second one the channel has ended, and reads no more.
            calls = [Invalidate(name_space=served.space().name_space, group=0, hashes=CHAIN), Mark()]
            frames = [CODEC.encode_call(call, number=1, session=SESSION, channel=Channel.EXPRESS) for call in calls]
            end.sendall(b"".join(struct.pack("<I", len(frame)) + frame for frame in frames))
            # Else it might read what comes next along with them, while the descriptor has another owner.
            while PacketSocket(end).count_unread_bytes():
                time.sleep(0.001)
            sent = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held.fileno()]))
            with contextlib.suppress(PermissionError):
                end.sendmsg([b"x"], [sent])
                assert not is_refused or not refuse_descriptors(end)
                held.part()
            served.channels.end(1)
        for _ in range(100):
            served.channels.tick()
            assert other.ask(Mark()) == Done()
            time.sleep(0.001)
