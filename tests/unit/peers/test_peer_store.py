"""Records from slot to slot between two servers' memories, over a real socket."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvoffload import native
from kvoffload.peers.peer_store import PeerStore
from kvoffload.peers.requests import ANSWER_BYTES, CODE, LinkAnswer, LinkStatus, answer_only
from kvoffload.tiers.base import RecordBatch, RecordNames, RecordOutcome, Tier
from kvoffload.tiers.coding_choice import KNOWN_BYTES
from kvoffload.tiers.envelope import RecordName
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import StoreFaultError, view_slot
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from kvoffload.types import Fingerprint
from tests.kit.peers.one_peer import OnePeer, one_peer, same_groups
from tests.kit.peers.stored import put
from tests.kit.tiers import tier_contract
from tests.kit.tiers.tier_contract import FINGERPRINT, Records, TierContract, hashes_of

TIMEOUT_S = 30.0
LATE_S = 0.3


class Taught:
    """A tier whose identity is known as soon as the first records come; all groups have records of their size."""

    def __init__(self, tier: RemoteTier, peer: OnePeer) -> None:
        self._tier = tier
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def put(self, batch: RecordBatch, **settings: Any) -> Any:
        self._peer.teach(self._peer.here, batch.names.fingerprint, same_groups(batch.record_bytes))
        return self._tier.put(batch, **settings)


@pytest.fixture(params=[True, False], ids=["sealed", "trusted"])
def is_sealed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def peer(is_sealed: bool) -> Iterator[OnePeer]:
    with one_peer(is_sealed=is_sealed) as made:
        yield made


@contextmanager
def tier_of(peer: OnePeer, *, is_sealed: bool) -> Iterator[Tier]:
    store = peer.settings(is_sealed=is_sealed)
    tier = RemoteTier(RemoteTierSettings(place="peer", open_store=lambda: PeerStore(store), coder=store.coder))
    assert tier.wait_open(TIMEOUT_S)
    yield Taught(tier, peer)  # type: ignore[misc]
    tier.close()


class TestPeerStore(TierContract):
    """A peer does not list its memory, and does not keep what came before a block."""

    knows_parents = False
    is_listed = False

    @pytest.fixture
    def tier(self, peer: OnePeer, is_sealed: bool) -> Iterator[Tier]:
        with tier_of(peer, is_sealed=is_sealed) as tier:
            yield tier


class TestPeerStoreThatCodes(TierContract):
    has_numbers = True
    knows_parents = False
    is_listed = False

    @pytest.fixture
    def tier(self, is_sealed: bool) -> Iterator[Tier]:
        with (
            one_peer(is_sealed=is_sealed, coding=Coding.ON, there=Coding.ON) as peer,
            tier_of(peer, is_sealed=is_sealed) as tier,
        ):
            yield tier


def get(store: PeerStore, records: Records) -> list[int]:
    return store.get_slots(records.names, records.slots, record_bytes=records.record_bytes).outcomes.tolist()


@pytest.fixture
def store(peer: OnePeer, is_sealed: bool) -> Iterator[PeerStore]:
    peer.teach(peer.here, FINGERPRINT, same_groups(5000))
    store = PeerStore(peer.settings(is_sealed=is_sealed))
    yield store
    store.close()


def test_an_identity_is_introduced_once_and_nothing_is_sent_twice(peer: OnePeer, store: PeerStore) -> None:
    records = Records(0, 4, 5000, filled=True)
    assert put(store, records) == [RecordOutcome.WRITTEN] * 4
    assert put(store, records) == [RecordOutcome.WRITTEN] * 4
    assert peer.introduced == 1
    assert peer.stored == [(0, records.names.hashes, records.parents)]
    assert peer.cache.stats.reserved == 0


def test_an_identity_that_a_peer_has_forgotten_is_introduced_again(peer: OnePeer, store: PeerStore) -> None:
    """Under another number: what memory has lost of it is not there, and what comes is."""
    records = Records(0, 4, 5000, filled=True)
    assert put(store, records) == [RecordOutcome.WRITTEN] * 4
    peer.cache.clear(0)
    while not peer.there.forget(FINGERPRINT):  # the link has answered, and has not come to its end
        os.sched_yield()
    assert peer.cache.forget_namespaces([]) == [0]
    for at in range(4095):
        peer.cache.open_namespace(Fingerprint(b"%032d" % at), same_groups(5000))
    assert get(store, records) == [RecordOutcome.MISSING] * 4
    assert peer.introduced == 2
    assert put(store, records) == [RecordOutcome.WRITTEN] * 4
    assert get(store, records) == [RecordOutcome.FOUND] * 4
    found = peer.there.find(FINGERPRINT)
    assert found is not None
    assert found.number == 4096


def test_an_identity_that_nobody_knows_is_not_stored(peer: OnePeer, store: PeerStore) -> None:
    records = Records(0, 2, 5000, filled=True)
    stranger = RecordNames(fingerprint=b"S" * 32, hashes=records.names.hashes)
    assert put(store, records, names=stranger) == [RecordOutcome.FAILED] * 2


def test_a_peer_that_does_not_take_an_identity_is_asked_on(peer: OnePeer, store: PeerStore) -> None:
    """It has it as another one. Its link stays good for others."""
    peer.refuses = True
    records = Records(0, 2, 5000, filled=True)
    assert put(store, records) == [RecordOutcome.FAILED] * 2
    assert get(store, records) == [RecordOutcome.MISSING] * 2
    assert store.look([RecordName(FINGERPRINT, 0, 0, hashes_of(0, 1)).key]) == [False]
    peer.refuses = False
    assert put(store, records) == [RecordOutcome.WRITTEN] * 2


def test_what_a_restarted_peer_has_on_disk_is_found_though_nobody_there_knows_the_identity(
    peer: OnePeer, store: PeerStore
) -> None:
    peer.below = {hashes_of(0, 1)}
    assert store.look([RecordName(FINGERPRINT, 0, 0, hashes_of(at, 1)).key for at in (0, 1)]) == [True, False]
    assert peer.introduced == 1
    get(store, Records(0, 2, 5000, filled=False))
    [(group, hashes, wait_s)] = peer.brought
    assert (group, hashes) == (0, hashes_of(0, 1))
    assert 0 < wait_s <= 10


def test_what_a_peer_cannot_remove_now_is_not_called_removed(peer: OnePeer, store: PeerStore) -> None:
    put(store, Records(0, 2, 5000, filled=True))
    keys = [RecordName(FINGERPRINT, 0, 0, hashes_of(at, 1)).key for at in (0, 1)]
    peer.is_stuck = True
    with pytest.raises(StoreFaultError, match="could not remove all"):
        store.remove(keys)


def test_records_of_another_size_are_not_mistaken(store: PeerStore) -> None:
    put(store, Records(0, 2, 5000, filled=True))
    assert put(store, Records(5, 2, 4999, filled=True)) == [RecordOutcome.FAILED] * 2
    assert get(store, Records(0, 2, 4999, filled=False)) == [RecordOutcome.MISSING] * 2


def test_a_block_is_readable_when_all_its_shards_have_come(peer: OnePeer, is_sealed: bool) -> None:
    peer.teach(peer.here, FINGERPRINT, same_groups(3000, shards=2))
    hashes = hashes_of(0, 3)
    store = PeerStore(peer.settings(is_sealed=is_sealed))
    memory = np.random.default_rng(1).integers(0, 256, (2, 3, 3000), np.uint8)

    def names(shard: int) -> RecordNames:
        return RecordNames(fingerprint=FINGERPRINT, hashes=hashes, shard=shard)

    def send(shard: int, *, is_good: bool = True) -> list[int]:
        slots = np.uint64(memory[shard].ctypes.data) + np.arange(3, dtype=np.uint64) * np.uint64(3000)
        digests = Records(0, 3, 3000, filled=False).digests.copy()
        for at in range(3):
            digests[at] = native.digest_record(
                memory[shard, at].data,
                fingerprint=FINGERPRINT,
                block_hash=hashes[32 * at : 32 * at + 32],
                group=0,
                shard=shard,
            )
        if not is_good:
            digests[1] ^= np.uint64(1)
        return store.put_slots(RecordBatch(names(shard), slots, record_bytes=3000, digests=digests)).tolist()

    assert send(0) == [RecordOutcome.WRITTEN] * 3
    keys = [RecordName(FINGERPRINT, 0, 1, hashes[32 * at : 32 * at + 32]).key for at in range(3)]
    assert store.look(keys) == [False] * 3
    assert send(1, is_good=False) == [RecordOutcome.WRITTEN, RecordOutcome.DAMAGED, RecordOutcome.WRITTEN]
    assert store.look(keys) == [True, False, True]
    assert send(1) == [RecordOutcome.WRITTEN] * 3
    assert store.look(keys) == [True] * 3
    assert peer.cache.stats.reserved == 0
    for shard in range(2):
        read = np.zeros((3, 3000), np.uint8)
        slots = np.uint64(read.ctypes.data) + np.arange(3, dtype=np.uint64) * np.uint64(3000)
        found = store.get_slots(names(shard), slots, record_bytes=3000)
        assert found.outcomes.tolist() == [RecordOutcome.FOUND] * 3
        assert np.array_equal(read, memory[shard])
    store.close()


def test_a_session_that_is_not_known_any_more_is_opened_anew(peer: OnePeer, is_sealed: bool) -> None:
    peer.is_lost = True
    with pytest.raises(StoreFaultError, match="does not know our session"):
        PeerStore(peer.settings(is_sealed=is_sealed))
    PeerStore(peer.settings(is_sealed=is_sealed)).close()


def test_both_sides_must_say_whether_it_is_sealed(peer: OnePeer, is_sealed: bool) -> None:
    with pytest.raises(StoreFaultError, match="peer_link"):
        PeerStore(peer.settings(is_sealed=not is_sealed))


def test_whoever_listens_there_without_the_secret_is_refused(peer: OnePeer, is_sealed: bool) -> None:
    """It knows the protocol, and even our token."""
    from kvoffload.peers.link_hello import HELLO_BYTES, HelloAnswer, HelloVerdict

    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        end, _ = listener.accept()
        with end:
            end.recv(HELLO_BYTES, socket.MSG_WAITALL)
            end.sendall(HelloAnswer(verdict=HelloVerdict.WELCOME, nonce=b"n" * 16, proof=b"p" * 32).pack())
            end.recv(1)

    thread = threading.Thread(target=pretend)
    thread.start()
    real = peer.find_ticket

    def lead_there(*, is_sealed: bool) -> Any:
        from kvoffload.config.tcp_address import TcpAddress

        return replace(real(is_sealed=is_sealed), address=TcpAddress("127.0.0.1", listener.getsockname()[1]))

    peer.find_ticket = lead_there  # type: ignore[method-assign]
    with pytest.raises(StoreFaultError, match="secret"):
        PeerStore(peer.settings(is_sealed=is_sealed))
    thread.join()
    listener.close()


def test_a_server_that_hangs_costs_one_timeout(is_sealed: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with one_peer(is_sealed=is_sealed) as peer:
        from kvoffload.config.tcp_address import TcpAddress
        from kvoffload.peers.control_link import LinkTicket

        ticket = LinkTicket(TcpAddress("127.0.0.1", listener.getsockname()[1]), b"t" * 16, b"s" * 32)
        peer.find_ticket = lambda *, is_sealed: ticket  # type: ignore[method-assign]
        with pytest.raises(StoreFaultError, match="timed out"):
            PeerStore(peer.settings(is_sealed=is_sealed, timeout_s=0.01))
    listener.close()


class Saying:
    """A link whose other end answers so, whatever it is asked."""

    def __init__(self, *said: bytes) -> None:
        self._said = list(said)

    def send(self, *_: Any, **__: Any) -> None: ...

    def receive(self, _: int, *, timeout_ms: int) -> bytes:
        return self._said.pop(0)


def test_an_answer_without_what_was_asked_for_is_the_peers_fault(peer: OnePeer) -> None:
    """The server's thread took the counts from an answer that had none."""
    head = answer_only(LinkStatus.CLOSING).pack()
    wanted = LinkAnswer(outcomes=np.zeros(2, np.uint8), digests=np.zeros(2, np.uint64)).pack()
    records = Records(0, 2, 100, filled=True)

    def connect_to(*said: bytes) -> PeerStore:
        ours, theirs = socket.socketpair()
        theirs.close()
        link: Any = Saying(*said)
        return PeerStore(peer.settings(), lambda ticket, settings: (ours, link))

    with pytest.raises(StoreFaultError, match="CLOSING where it was to tell of 2 records"):
        connect_to(head).probe()
    store = connect_to(wanted[:ANSWER_BYTES], wanted[ANSWER_BYTES:], head)
    with pytest.raises(StoreFaultError, match="CLOSING where it was to tell of 2 records"):
        store.put_slots(records.batch())


def test_an_interrupted_store_fails_at_once(store: PeerStore) -> None:
    store.interrupt()
    with pytest.raises(StoreFaultError):
        store.probe()


def test_it_says_how_much_memory_the_peer_has(peer: OnePeer, store: PeerStore) -> None:
    put(store, Records(0, 4, 5000, filled=True))
    facts = store.probe()
    assert (facts.capacity_bytes, facts.used_bytes) == (
        peer.cache.stats.capacity_bytes,
        peer.cache.stats.used_bytes,
    )
    assert facts.used_bytes > 0


CODED_BYTES = 20_000


def coded(count: int = 4, *, filled: bool = True) -> Records:
    return Records(0, count, CODED_BYTES, filled=filled, has_numbers=True)


@pytest.mark.parametrize("there", list(Coding))
@pytest.mark.parametrize("here", list(Coding))
def test_records_are_coded_where_both_sides_do_it_and_are_the_same_in_any_case(
    is_sealed: bool, here: Coding, there: Coding
) -> None:
    """With `auto`, nothing is coded before the link's speed is known, and a server that is asked to code does so."""
    written, read = coded(), coded(filled=False)
    with (
        one_peer(is_sealed=is_sealed, coding=here, there=there) as peer,
        tier_of(peer, is_sealed=is_sealed) as tier,
    ):
        assert tier_contract.put(tier, written).count(RecordOutcome.WRITTEN) == 4
        sent = tier.health()[0].counts.get("coded_records", 0)
        assert tier_contract.get(tier, read).count(RecordOutcome.FOUND) == 4
        came = tier.health()[0].counts.get("coded_records", 0) - sent
    assert np.array_equal(written.memory, read.memory)
    assert sent == (4 if here is Coding.ON and there is not Coding.OFF else 0)
    assert came == (4 if here is Coding.ON and there is not Coding.OFF else 0)


def test_what_a_server_before_coded_records_says_is_taken_as_it_is(peer: OnePeer, is_sealed: bool) -> None:
    """It answers with zeros where the code would be. Peers with `off` say the same."""
    peer.coding = Coding.ON
    with tier_of(peer, is_sealed=is_sealed) as tier:
        tier_contract.put(tier, coded())
        read = coded(filled=False)
        assert tier_contract.get(tier, read).count(RecordOutcome.FOUND) == 4
        assert np.array_equal(read.memory, coded().memory)
        assert "coded_records" not in tier.health()[0].counts


@contextmanager
def hostile(*said: bytes, coding: Coding = Coding.ON) -> Iterator[PeerStore]:
    """A store whose peer says that, and nothing more."""
    ours, theirs = socket.socketpair()
    with one_peer(is_sealed=False, coding=coding) as peer:
        peer.teach(peer.here, FINGERPRINT, same_groups(CODED_BYTES))
        link = native.RecordLink(os.dup(ours.fileno()), None)
        store = PeerStore(peer.settings(is_sealed=False), lambda ticket, settings: (ours, link))

        def speak() -> None:
            theirs.sendall(b"".join(said))
            theirs.shutdown(socket.SHUT_WR)

        speaking = threading.Thread(target=speak)
        speaking.start()
        yield store
        store.close()
        speaking.join()
        theirs.close()


def answer_of(records: Records, *, code: int = CODE) -> bytes:
    outcomes = np.full(len(records.names), RecordOutcome.FOUND, np.uint8)
    return LinkAnswer(outcomes=outcomes, digests=records.digests, code=code).pack()


def code_of(records: Records, at: int) -> bytes:
    made = native.RecordEncoder().encode(records.memory[at])
    assert made is not None
    return made


def packed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def test_a_record_whose_code_is_spoiled_is_a_miss_and_the_others_are_found() -> None:
    records, read = coded(), coded(filled=False)
    codes = [code_of(records, at) for at in range(4)]
    flipped = bytearray(codes[1])
    flipped[len(flipped) // 2] ^= 4
    said = b"".join(map(packed, (codes[0], bytes(flipped), codes[2], codes[3][:-1])))
    with hostile(answer_of(records), said) as store:
        assert get(store, read) == [
            RecordOutcome.FOUND,
            RecordOutcome.DAMAGED,
            RecordOutcome.FOUND,
            RecordOutcome.DAMAGED,
        ]
    assert np.array_equal(read.memory[[0, 2]], records.memory[[0, 2]])


def test_a_spoiled_record_is_removed_from_its_peer_and_counted(is_sealed: bool) -> None:
    """A coded record is treated like a plain one."""
    with (
        one_peer(is_sealed=is_sealed, coding=Coding.ON, there=Coding.ON) as peer,
        tier_of(peer, is_sealed=is_sealed) as tier,
    ):
        tier_contract.put(tier, coded())
        spoil(peer, hashes_of(1, 1))
        ended = tier_contract.get(tier, coded(filled=False))
        assert (ended.outcomes == RecordOutcome.DAMAGED).tolist() == [False, True, False, False]
        assert tier_contract.look(tier, coded().names) == [True, False, True, True]
        assert tier.health()[0].counts["get_damaged"] == 1


def spoil(peer: OnePeer, block_hash: bytes) -> None:
    """Changes a record in the peer's memory."""
    session = peer.cache.open_session()
    space = peer.there.find(FINGERPRINT)
    assert space is not None
    acquired = peer.cache.acquire_entries(session, space.number, 0, block_hash)
    address = int(peer.cache.pointers(acquired.groups[0].addresses)[0])
    view_slot(address, CODED_BYTES)[77] ^= 1
    peer.cache.release(session, acquired.lease)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (packed(bytes(CODED_BYTES)), "codes records of 20000 bytes in 20000"),
        (b"\xff\xff\xff\xff", "codes records of 20000 bytes in 4294967295"),
        (packed(code_of(coded(), 0))[:-1], "hung up"),
        (b"\1\0", "hung up"),
        (b"", "hung up"),
    ],
    ids=["as long", "longer than any", "cut off", "half a length", "nothing"],
)
def test_a_length_that_lies_or_a_code_that_ends_early_costs_its_link(said: bytes, fault: str) -> None:
    with hostile(answer_of(coded(1)), said) as store, pytest.raises(StoreFaultError, match=fault):
        get(store, coded(1, filled=False))


@pytest.mark.parametrize(("asked", "answered"), [(Coding.OFF, CODE), (Coding.ON, CODE + 1)])
def test_a_code_that_nobody_asked_for_costs_its_link(asked: Coding, answered: int) -> None:
    with (
        hostile(answer_of(coded(1), code=answered), coding=asked) as store,
        pytest.raises(StoreFaultError, match=f"an answer in code {answered}"),
    ):
        get(store, coded(1, filled=False))


@pytest.mark.parametrize(
    ("said", "ends_by", "is_learned"),
    [
        (b"", "timeout", True),
        (answer_of(coded()), "timeout", True),
        (answer_of(coded(), code=0), "timeout", False),
        (b"", "interrupt", True),
        (b"", "hang-up", False),
    ],
)
def test_a_first_coded_get_that_is_late_teaches_to_ask_for_plain_records(
    said: bytes, ends_by: str, is_learned: bool
) -> None:
    """A giving server may be coding before or after its answer; one that answers that its records are plain is not."""
    ticks = itertools.count()
    coder = RecordCoder(Coding.AUTO, clock=lambda: next(ticks) * 1e-9)
    with coder.reading():
        coder.told_read(KNOWN_BYTES)
    ours, theirs = socket.socketpair()
    with one_peer(is_sealed=False) as peer:
        peer.teach(peer.here, FINGERPRINT, same_groups(CODED_BYTES))
        link = native.RecordLink(os.dup(ours.fileno()), None)
        settings = replace(
            peer.settings(is_sealed=False, timeout_s=LATE_S if ends_by == "timeout" else TIMEOUT_S), coder=coder
        )
        store = PeerStore(settings, lambda ticket, settings: (ours, link))
        theirs.sendall(said)
        if ends_by == "interrupt":
            store.interrupt()
        elif ends_by == "hang-up":
            theirs.shutdown(socket.SHUT_RDWR)
        assert coder.asks(1)
        with pytest.raises(StoreFaultError), coder.reading():
            get(store, coded(filled=False))
        assert coder.asks(1) is not is_learned
        store.close()
        theirs.close()
