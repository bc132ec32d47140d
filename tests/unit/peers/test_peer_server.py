"""Connections to a server's links: nonsense, silence, too many, a wrong secret; and the server's end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffload import native
from kvoffload.errors import ConfigError
from kvoffload.peers import peer_server
from kvoffload.peers.link_hello import HELLO_ANSWER_BYTES, HelloVerdict, LinkHello, LinkSecret, read_hello_answer
from kvoffload.peers.peer_server import MAX_NEWCOMERS, MAX_OF_ONE_PEER, SESSIONS_OF_ONE_PEER, PeerServer
from kvoffload.peers.peer_store import PeerStore
from kvoffload.peers.requests import (
    ANSWER_BYTES,
    CODE,
    HEAD_BYTES,
    LinkRequest,
    LinkVerb,
    pack_code,
    read_answer,
    read_answer_head,
)
from kvoffload.peers.seal_library import SealLibrary
from kvoffload.tiers.base import RecordOutcome
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.record_store import StoreFaultError
from tests.kit.open_files import count_open_files
from tests.kit.peers.one_peer import LOOPBACK, OnePeer, one_peer, same_groups
from tests.kit.peers.stored import put
from tests.kit.scarce_threads import scarce_threads
from tests.kit.server.tiers import await_that
from tests.kit.tiers.tier_contract import FINGERPRINT, Records

TIMEOUT_S = 30.0


@pytest.fixture
def peer() -> Iterator[OnePeer]:
    with one_peer(is_sealed=False) as made:
        made.teach(made.here, FINGERPRINT, same_groups(5000))
        yield made


def knock(peer: OnePeer) -> socket.socket:
    address = peer.server.address
    return socket.create_connection((address.host, address.port), TIMEOUT_S)


def greet(end: socket.socket, hello: bytes) -> Any:
    end.sendall(hello)
    return read_hello_answer(end.recv(HELLO_ANSWER_BYTES, socket.MSG_WAITALL))


def open_link(peer: OnePeer) -> socket.socket:
    """Opens a link by hand, after the hello."""
    end = knock(peer)
    session = peer.server.open_session("by hand", "")
    hello = LinkHello(token=session.token, nonce=b"n" * 16, is_sealed=False).pack()
    answer = greet(end, hello)
    assert answer.verdict is HelloVerdict.WELCOME
    end.sendall(LinkSecret(session.secret, hello, answer.nonce).client_proof)
    return end


def is_let_go(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n".ljust(64, b" "), b"\0" * 64, b"KVPL"])
def test_nonsense_is_let_go(peer: OnePeer, said: bytes) -> None:
    with knock(peer) as end:
        end.sendall(said)
        with contextlib.suppress(OSError):  # it may have been let go by now
            end.shutdown(socket.SHUT_WR)
        assert is_let_go(end)
    PeerStore(peer.settings(is_sealed=False)).close()


def test_who_says_nothing_is_let_go(peer: OnePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "HELLO_TIMEOUT_S", 0.01)
    with knock(peer) as end:
        assert is_let_go(end)


def test_a_token_without_its_secret_is_no_way_in(peer: OnePeer) -> None:
    session = peer.server.open_session("one", "")
    hello = LinkHello(token=session.token, nonce=b"n" * 16, is_sealed=False).pack()
    with knock(peer) as end:
        answer = greet(end, hello)
        assert answer.verdict is HelloVerdict.WELCOME
        end.sendall(LinkSecret(b"guessed".ljust(32), hello, answer.nonce).client_proof)
        assert is_let_go(end)
    assert "secret" not in repr(session)


def test_an_old_session_is_forgotten_when_there_are_many_newer_ones(peer: OnePeer) -> None:
    old = peer.server.open_session("one", "")
    newer = [peer.server.open_session("one", "") for _ in range(SESSIONS_OF_ONE_PEER)]
    for session, verdict in ((old, HelloVerdict.UNKNOWN), (newer[0], HelloVerdict.WELCOME)):
        with knock(peer) as end:
            answer = greet(end, LinkHello(token=session.token, nonce=b"n" * 16, is_sealed=False).pack())
            assert answer.verdict is verdict


def test_a_request_that_asks_for_too_much_ends_its_link_and_no_other(peer: OnePeer) -> None:
    store = PeerStore(peer.settings(is_sealed=False))
    with open_link(peer) as end:
        end.sendall(b"\xff" * HEAD_BYTES)
        assert is_let_go(end)
    assert put(store, Records(0, 2, 5000, filled=True)) == [2, 2]
    store.close()


def test_one_peer_has_so_many_links_and_no_more(peer: OnePeer) -> None:
    stores = []
    for _ in range(MAX_OF_ONE_PEER):
        stores.append(PeerStore(peer.settings(is_sealed=False)))
        stores[-1].probe()  # a link that was answered stays, however many sessions are begun after it
    with pytest.raises(StoreFaultError, match=r"as many links|hung up"):
        PeerStore(peer.settings(is_sealed=False)).probe()
    for store in stores:
        store.probe()
        store.close()
    await_that(lambda: len(peer.server) == 0)
    PeerStore(peer.settings(is_sealed=False)).close()


def test_whoever_waits_at_the_door_keeps_no_peer_out(peer: OnePeer) -> None:
    stores = [PeerStore(peer.settings(is_sealed=False)) for _ in range(2)]
    with contextlib.ExitStack() as doors:
        waiting = [doors.enter_context(knock(peer)) for _ in range(MAX_NEWCOMERS)]
        await_that(lambda: len(peer.server) == 2 + MAX_NEWCOMERS)
        late = doors.enter_context(open_link(peer))
        assert is_let_go(waiting[0])
        stores.append(PeerStore(peer.settings(is_sealed=False)))
        assert is_let_go(waiting[1])
        for store in stores:
            store.probe()
            store.close()
        late.settimeout(0)
        with pytest.raises(BlockingIOError):
            late.recv(1)


def test_bad_links_of_one_peer_make_one_line(peer: OnePeer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with open_link(peer) as end:
            end.sendall(b"\xff" * HEAD_BYTES)
            assert is_let_go(end)
    assert caplog.text.count("a link of peer by hand: ") == 1


def test_a_put_that_is_cut_off_leaves_nothing_behind(peer: OnePeer) -> None:
    peer.teach(peer.there, FINGERPRINT, same_groups(5000))
    records = Records(0, 4, 5000, filled=True)
    request = LinkRequest(
        verb=LinkVerb.PUT,
        names=records.names,
        record_bytes=5000,
        digests=records.digests.tobytes(),
        parents=records.parents,
    )
    with open_link(peer) as end:
        end.sendall(request.pack())
        end.recv(ANSWER_BYTES + 4 * 9, socket.MSG_WAITALL)
        assert peer.cache.stats.reserved == 4
        end.sendall(b"half of a record" * 100)
    await_that(lambda: peer.cache.stats.reserved == 0)
    assert peer.cache.stats.readable == 0


def test_who_is_no_peer_any_more_has_no_links_and_opens_none(peer: OnePeer) -> None:
    store = PeerStore(peer.settings(is_sealed=False))
    session = peer.server.open_session("by hand", "")
    with open_link(peer) as end, knock(peer) as late:
        hello = LinkHello(token=session.token, nonce=b"n" * 16, is_sealed=False).pack()
        answer = greet(late, hello)
        await_that(lambda: peer.server.count_links("by hand") == 1)
        peer.server.keep_only(lambda name: name == "one")
        assert is_let_go(end)
        late.sendall(LinkSecret(session.secret, hello, answer.nonce).client_proof)
        assert is_let_go(late)
        with knock(peer) as again:
            assert greet(again, hello).verdict is HelloVerdict.UNKNOWN
    store.probe()
    store.close()


def test_a_server_ends_with_links_that_do_nothing() -> None:
    with one_peer() as peer:
        store = PeerStore(peer.settings())
        peer.server.close()
        with pytest.raises(StoreFaultError):
            store.probe()
        peer.server.close()


def test_with_nothing_to_seal_with_no_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> SealLibrary:
        raise RuntimeError("no libcrypto")

    monkeypatch.setattr(peer_server, "find_seal_library", find)
    with pytest.raises(ConfigError, match="there is nothing to seal links with: no libcrypto"):
        PeerServer(LOOPBACK, is_sealed=True)
    PeerServer(LOOPBACK, is_sealed=False).close()


def test_it_tells_what_seals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", peer_server.__name__)
    library = SealLibrary(name="OpenSSL 3.0.19", version=0x300000D0, file="/lib/libcrypto.so.3")
    monkeypatch.setattr(peer_server, "find_seal_library", lambda: library)
    PeerServer(LOOPBACK, is_sealed=True).close()
    assert caplog.messages == ["links are sealed by OpenSSL 3.0.19 (/lib/libcrypto.so.3)"]


def test_an_address_that_is_taken_is_refused_in_one_line() -> None:
    server = PeerServer(LOOPBACK, is_sealed=True)
    with pytest.raises(ConfigError, match=f"the server cannot listen for peers at {server.address}"):
        PeerServer(server.address, is_sealed=True)
    server.close()


@pytest.fixture
def coding_peer() -> Iterator[OnePeer]:
    with one_peer(is_sealed=False, coding=Coding.ON, there=Coding.ON) as made:
        made.teach(made.there, FINGERPRINT, same_groups(CODED_BYTES))
        yield made


CODED_BYTES = 20_000


def ask_put(end: socket.socket, records: Records, *, code: int = CODE) -> Any:
    """Asks to put records, and returns what the server says to it."""
    request = LinkRequest(
        verb=LinkVerb.PUT,
        names=records.names,
        record_bytes=CODED_BYTES,
        digests=records.digests.tobytes(),
        parents=records.parents,
        code=code,
    )
    end.sendall(request.pack())
    return hear(end, len(records.names), code=code)


def hear(end: socket.socket, count: int, *, code: int = 0) -> Any:
    head = read_answer_head(end.recv(ANSWER_BYTES, socket.MSG_WAITALL), count, code=code)
    return read_answer(head, end.recv(head.rest_bytes, socket.MSG_WAITALL))


def encode(record: Any) -> bytes:
    made = native.RecordEncoder().encode(record)
    assert made is not None
    return made


def packed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def numbers(count: int) -> Records:
    return Records(0, count, CODED_BYTES, filled=True, has_numbers=True)


def test_a_put_whose_code_is_spoiled_is_damaged_and_the_others_are_stored(coding_peer: OnePeer) -> None:
    records = numbers(4)
    codes = [encode(records.memory[at]) for at in range(4)]
    flipped = bytearray(codes[1])
    flipped[len(flipped) // 2] ^= 64
    with open_link(coding_peer) as end:
        assert ask_put(end, records).code == CODE
        said = packed(codes[0]) + packed(bytes(flipped)) + packed(codes[2][:-1]) + packed(b"")
        end.sendall(pack_code(CODE) + said + records.memory[3].tobytes())
        outcomes = hear(end, 4).outcomes.tolist()
    assert outcomes == [RecordOutcome.WRITTEN, RecordOutcome.DAMAGED, RecordOutcome.DAMAGED, RecordOutcome.WRITTEN]
    assert coding_peer.cache.stats.reserved == 0
    assert coding_peer.cache.stats.readable == 2


@pytest.mark.parametrize(
    "said",
    [
        pack_code(CODE + 1),
        pack_code(CODE) + packed(bytes(CODED_BYTES)),
        pack_code(CODE) + b"\xff\xff\xff\xff",
        pack_code(CODE) + packed(bytes(100))[:-1],
        pack_code(CODE)[:2],
        pack_code(0) + bytes(CODED_BYTES - 1),
    ],
    ids=["another version", "as long", "longer than any", "cut off", "half a word", "not coded, cut off"],
)
def test_a_put_that_lies_about_its_code_or_is_cut_off_leaves_nothing_behind(coding_peer: OnePeer, said: bytes) -> None:
    with open_link(coding_peer) as end:
        ask_put(end, numbers(1))
        assert coding_peer.cache.stats.reserved == 1
        with contextlib.suppress(OSError):  # it may have let go by then
            end.sendall(said)
            end.shutdown(socket.SHUT_WR)
        assert is_let_go(end)
    await_that(lambda: coding_peer.cache.stats.reserved == 0)
    assert coding_peer.cache.stats.readable == 0
    coding_peer.teach(coding_peer.here, FINGERPRINT, same_groups(CODED_BYTES))
    store = PeerStore(coding_peer.settings(is_sealed=False))
    assert put(store, numbers(1)) == [RecordOutcome.WRITTEN]
    store.close()


def test_a_client_that_ends_while_coded_records_are_on_their_way_to_it_holds_none(coding_peer: OnePeer) -> None:
    """More than sockets hold, so that the server still sends."""
    coding_peer.teach(coding_peer.here, FINGERPRINT, same_groups(CODED_BYTES))
    store = PeerStore(coding_peer.settings(is_sealed=False))
    records = numbers(700)
    assert set(put(store, records)) == {RecordOutcome.WRITTEN}
    store.close()
    with open_link(coding_peer) as end:
        asked = LinkRequest(verb=LinkVerb.GET, names=records.names, record_bytes=CODED_BYTES, code=CODE)
        end.sendall(asked.pack())
        assert hear(end, 700, code=CODE).code == CODE
        assert coding_peer.cache.stats.leases == 1
    await_that(lambda: coding_peer.cache.stats.leases == 0)


@pytest.mark.parametrize("code", [0, CODE + 1])
def test_a_client_of_another_version_gets_records_as_they_are(coding_peer: OnePeer, code: int) -> None:
    """One from before says 0; a later one may know a code that this server does not."""
    records = numbers(3)
    with open_link(coding_peer) as end:
        assert ask_put(end, records, code=code).code == 0
        end.sendall(records.memory.tobytes())
        assert hear(end, 3).outcomes.tolist() == [RecordOutcome.WRITTEN] * 3
        asked = LinkRequest(verb=LinkVerb.GET, names=records.names, record_bytes=CODED_BYTES, code=code)
        end.sendall(asked.pack())
        assert hear(end, 3, code=code).code == 0
        assert end.recv(3 * CODED_BYTES, socket.MSG_WAITALL) == records.memory.tobytes()


def test_servers_with_off_answer_as_those_from_before(peer: OnePeer) -> None:
    peer.teach(peer.there, FINGERPRINT, same_groups(CODED_BYTES))
    with open_link(peer) as end:
        assert ask_put(end, numbers(1)).code == 0
        end.sendall(numbers(1).memory.tobytes())
        assert hear(end, 1).outcomes.tolist() == [RecordOutcome.WRITTEN]


def test_without_a_thread_it_does_not_listen_and_says_why() -> None:
    before = count_open_files()
    with scarce_threads(), pytest.raises(ConfigError, match="a thread for links of peers cannot be started"):
        PeerServer(LOOPBACK, is_sealed=False)
    assert count_open_files() == before
