"""The control channel to a real server: who is let in, what is said when it is not there, and that it comes back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvoffload.config.tcp_address import TcpAddress
from kvoffload.key_files import KeyPair
from kvoffload.peers import PeerSpace
from kvoffload.peers.control_link import ControlLink, ControlSettings
from kvoffload.protocol import CODEC, Call, Error, ErrorCode, Hello
from kvoffload.server.loop import CacheServer
from kvoffload.server.sessions.session import Guest
from kvoffload.server.sessions.settings import TcpSettings
from kvoffload.tiers.record_store import StoreFaultError
from tests.kit.cache.cache_model import HYBRID, PLAIN
from tests.kit.server.fleets import Fleet
from tests.kit.server.remote_client import make_keys
from tests.kit.server.tiers import await_that, serving

TIMEOUT_S = 20.0
SPACE = PeerSpace(number=0, fingerprint=b"F" * 32, geometry=HYBRID)


class There:
    """A server of a fleet of two, and what the other one knows of it."""

    def __init__(self, folder: Path) -> None:
        self.fleet = Fleet(folder, "there", "here")

    @contextmanager
    def serving(self) -> Iterator[CacheServer]:
        with self.fleet.serving("there") as server:
            await_that(lambda: server.core.domains[""].cache is not None)
            yield server

    def link(self, keys: KeyPair | None = None, *, peer_key: str = "", timeout_s: float = TIMEOUT_S) -> ControlLink:
        member = self.fleet.members["there"]
        settings = ControlSettings(
            address=member.address,
            peer_key=peer_key or member.key,
            keys=keys or self.fleet.keys["here"],
            timeout_s=timeout_s,
        )
        return ControlLink(settings)


@pytest.fixture
def there(tmp_path: Path) -> There:
    return There(tmp_path)


def test_a_ticket_is_kept_until_it_is_no_good(there: There) -> None:
    with there.serving() as server:
        link = there.link()
        ticket = link.find_ticket(is_sealed=True)
        assert (len(ticket.token), len(ticket.secret)) == (16, 32)
        assert server.peers is not None
        assert ticket.address.port == server.peers.port
        assert link.find_ticket(is_sealed=True) is ticket
        link.forget_ticket(ticket)
        newer = link.find_ticket(is_sealed=True)
        assert newer.token != ticket.token
        link.forget_ticket(ticket)
        assert link.find_ticket(is_sealed=True) is newer
        assert "secret" not in repr(newer)
        link.close()


def test_an_identity_is_introduced_and_a_conflict_is_told(there: There, caplog: pytest.LogCaptureFixture) -> None:
    with there.serving() as server:
        link = there.link()
        assert link.introduce(SPACE)
        assert link.introduce(SPACE)
        cache = server.core.domains[""].cache
        assert cache is not None
        assert cache.stats.namespaces == 1
        other = PeerSpace(number=0, fingerprint=b"F" * 32, geometry=PLAIN)
        assert not link.introduce(other)
        assert "takes no records of an identity: introduce: " in caplog.text
        assert link.introduce(SPACE)
        link.close()


def test_an_absent_peer_is_one_line_and_is_found_when_it_comes(there: There) -> None:
    link = there.link(timeout_s=0.05)
    with pytest.raises(StoreFaultError, match=r"the peer at tcp://127.0.0.1:\d+: no answer in time"):
        link.find_ticket(is_sealed=True)
    with there.serving():
        patient = there.link()
        patient.find_ticket(is_sealed=True)
        patient.close()
    link.close()


def test_an_absent_peer_costs_no_new_threads_at_each_try(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ ends the process if it cannot start the threads of a context."""
    made: list[object] = []
    context = zmq.Context
    monkeypatch.setattr(zmq, "Context", lambda **options: made.append(options) or context(**options))
    link = there.link(timeout_s=0.01)
    for _ in range(3):
        with pytest.raises(StoreFaultError, match="no answer in time"):
            link.find_ticket(is_sealed=True)
    assert len(made) == 1
    link.close()


@pytest.mark.parametrize("left", [0, 1])
def test_without_threads_for_zeromq_a_peer_is_absent(there: There, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    link = there.link()
    with there.serving():
        start, starts = threading.Thread.start, iter(range(left))

        def start_some(thread: threading.Thread) -> None:
            if thread.name == "kvoffload-probe" and next(starts, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_some)
            with pytest.raises(StoreFaultError, match="no thread can be started for it"):
                link.find_ticket(is_sealed=True)
        link.find_ticket(is_sealed=True)
    link.close()


class Refusing:
    """A server that refuses every greeting, once the test lets it answer."""

    def __init__(self) -> None:
        self.asked: list[Hello] = []
        self.was_asked, self.may_answer, self._is_over = threading.Event(), threading.Event(), threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.keys = make_keys()
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if not self._socket.poll(10):
                continue
            connection, frame = self._socket.recv_multipart()
            call = CODEC.decode_call(frame)
            assert isinstance(call, Call)
            assert isinstance(call.message, Hello)
            self.asked.append(call.message)
            self.was_asked.set()
            self.may_answer.wait(TIMEOUT_S)
            refusal = Error(code=ErrorCode.BUSY, message="not now")
            self._socket.send_multipart([connection, CODEC.encode_answer(refusal, number=call.number, boot_id=1)])

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()


def test_those_who_wait_for_one_that_fails_do_not_wait_again() -> None:
    """A caller that came before the failure gets it, too; a caller that comes after it asks again."""
    server = Refusing()
    address = TcpAddress("127.0.0.1", server.port)
    peer_key = server.keys.public.decode()
    link = ControlLink(ControlSettings(address=address, peer_key=peer_key, keys=make_keys(), timeout_s=TIMEOUT_S))
    faults: list[str] = []

    def find() -> None:
        with pytest.raises(StoreFaultError) as fault:
            link.find_ticket(is_sealed=True)
        faults.append(str(fault.value))

    threads = [threading.Thread(target=find) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert server.was_asked.wait(TIMEOUT_S)
    await_that(lambda: all(is_in(thread, "find_ticket") for thread in threads))
    server.may_answer.set()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 1
    assert faults == [f"the peer at tcp://127.0.0.1:{server.port}: not now"] * 4
    find()
    assert len(server.asked) == 2
    link.close()
    server.close()


def is_in(thread: threading.Thread, function: str) -> bool:
    """Whether it is there, or has called something from there."""
    frame = sys._current_frames().get(thread.ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return function in names


@pytest.mark.parametrize("wrong", ["ours", "theirs"])
def test_a_wrong_key_on_either_side_is_no_way_in(there: There, wrong: str) -> None:
    stranger = make_keys()
    with there.serving():
        settings = {"keys": stranger} if wrong == "ours" else {"peer_key": stranger.public.decode()}
        link = there.link(timeout_s=0.3, **settings)  # type: ignore[arg-type]
        with pytest.raises(StoreFaultError, match="does not know our key"):
            link.find_ticket(is_sealed=True)
        link.close()


def test_a_server_without_links_says_which_setting_it_lacks(tmp_path: Path) -> None:
    there = There(tmp_path)
    member, keys = there.fleet.members["there"], there.fleet.keys["there"]
    guests = {there.fleet.members["here"].key: Guest(domain="", is_peer=True)}
    remote = TcpSettings(address=member.address, keys=keys, guests=guests)
    with serving(tmp_path / "plain", remote=remote):
        link = there.link()
        with pytest.raises(StoreFaultError, match="set peer_listen there"):
            link.find_ticket(is_sealed=True)
        link.close()


def test_a_server_that_came_anew_is_greeted_anew(there: There) -> None:
    link = there.link()
    with there.serving():
        first = link.find_ticket(is_sealed=True)
    with there.serving():
        link.forget_ticket(first)
        try:
            second = link.find_ticket(is_sealed=True)
        except StoreFaultError:
            # The session was the old one's.
            second = link.find_ticket(is_sealed=True)
        assert second.token != first.token
    link.close()
