"""One hostile process: `python -m tests.hostile.user KIND UID SECONDS SEED PLACE`, where PLACE is JSON.

It prints what it has done so far as a line of JSON, again and again, because it may be killed. All that it does is
bounded: so many seconds, connections and descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

import zmq

from kvoffload.errors import KVOffloadError
from kvoffload.protocol import (
    MESSAGES,
    Acquire,
    AcquireEntries,
    ClientMessage,
    Credits,
    CreditsGranted,
    Hint,
    IdentityField,
    Publish,
    Register,
)
from kvoffload.protocol.limits import FRAME_BYTES, MAX_BATCH, MAX_BLOCKS, MAX_IDENTITY, MAX_REPORT
from kvoffload.protocol.message import Message
from kvoffload.types import HASH_BYTES
from tests.hostile.largest import FLAT, RIGHT, WIDE, Largest, collide, read_index_seed
from tests.kit.hostile.forging import Known, forge_one
from tests.kit.hostile.scene import RIGHT as RIGHT_FIELDS
from tests.kit.hostile.user import HostileUser
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.hostile_user import HELLO_GREETING
from tests.kit.server.raw_client import RawClient
from tests.kit.server.remote_client import RemoteClient, make_keys

FILES = 2048
CONNECTIONS = 4
"""Connections of the process that sends messages at their largest."""
HELD = 256
"""Connections that a process holds at once, at most."""
ENGINES = 16
CONNECT_S, ANSWER_S = 0.2, 1.0
TELL_S = 0.2
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Slow: "
KNOWN = Known(names=("red", "blue"), fields=RIGHT_FIELDS)
_REFUSED = (KVOffloadError, OSError, AssertionError, zmq.ZMQError)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the server can be reached, as far as its users are told."""

    socket: str
    tcp: int = 0
    """Port of the TCP gate. 0: there is none."""
    peers: int = 0
    """Port at which links of other servers are taken. 0: there is none."""
    web: int = 0
    server_key: str = ""

    @property
    def path(self) -> Path:
        return Path(self.socket)

    @property
    def control(self) -> str:
        return str(self.path.with_name(self.path.name + ".control"))


class Attack:
    """One process's attack: where, by which numbers, until when, and what it has done."""

    def __init__(self, place: Place, seed: int, seconds: float) -> None:
        self.place = place
        self.chance = Random(seed)
        self.done: Counter[str] = Counter()
        self._end_s = time.monotonic() + seconds
        self._told_s = 0.0

    def goes_on(self) -> bool:
        """Whether there is time left. Prints what was done."""
        now = time.monotonic()
        if now > self._told_s + TELL_S or now > self._end_s:
            self._told_s = now
            print(json.dumps(self.done), flush=True)
        return now < self._end_s

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Counts it, or that it was refused."""
        try:
            yield
            self.done[what] += 1
        except _REFUSED:
            self.done[f"{what}, refused"] += 1

    def join(self, register: Register | None = None) -> HostileUser:
        user = HostileUser(self.place.path, KNOWN, self.chance.getrandbits(32), register)
        self.done["joined"] += 1
        return user

    def connect(self, kind: int, address: str | int) -> socket.socket | None:
        """A connection to a path, or to a port of loopback from one of many addresses."""
        connected = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, kind)
        connected.settimeout(CONNECT_S)
        try:
            if isinstance(address, str):
                connected.connect(address)
            else:
                connected.bind((f"127.0.{self.chance.randrange(1, 5)}.1", 0))
                connected.connect(("127.0.0.1", address))
        except OSError:
            connected.close()
            self.done["connections refused"] += 1
            return None
        self.done["connections"] += 1
        return connected


def channels_of(message: type[Message]) -> list[str]:
    """A client's message goes where it belongs; the server's own ones go where the server might read them."""
    named = [channel.value for channel in message.channels]
    return named if issubclass(message, ClientMessage) else [*named, "control"]


def send_largest(attack: Attack) -> None:
    """Every message at its largest, over several connections at once; names are random or share a hash chain."""
    users = [attack.join(WIDE) for _ in range(CONNECTIONS)]
    while attack.goes_on():
        for kind in attack.chance.sample(MESSAGES, len(MESSAGES)):
            name_space, names = draw_names(users[0], is_random=attack.chance.random() < 0.5)
            right = RIGHT | {"name_space": name_space}
            forged = Largest(names=names, right=right, chance=attack.chance).make(kind)
            for user in users:
                for channel in channels_of(kind):
                    user.say(channel, forged)
            attack.done[f"largest {forged.what}"] += 1
            for user in users:
                with attack.trying("answered"):
                    user.settle(ANSWER_S)
            attack.goes_on()


def draw_names(user: HostileUser, *, is_random: bool) -> tuple[int, bytes]:
    """The user's namespace, and as many names as a message may have: random ones, or those of one hash chain."""
    client = user.client
    assert client is not None
    assert client.held is not None
    if is_random:
        return client.name_space, hashes_of(MAX_BLOCKS)
    return client.name_space, collide(read_index_seed(client.held.index))


def hint_one_chain(attack: Attack) -> None:
    """Fills one chain of the index's hash table to its bound, and then names it in hints for 64 groups."""
    user = attack.join(FLAT)
    name_space, names = draw_names(user, is_random=False)
    assert user.client is not None
    with attack.trying("filled"):
        granted = user.client.express.ask(Credits(name_space=name_space, group=0, count=2048))
        assert isinstance(granted, CreditsGranted)
        chosen = names[: len(granted.tickets) // 8 * HASH_BYTES]
        user.client.tell(Publish(name_space=name_space, group=0, shard=0, tickets=granted.tickets, hashes=chosen))
    right = RIGHT | {"name_space": name_space, "session": "", "token": ""}
    largest = Largest(names=names, right=right, chance=attack.chance)
    while attack.goes_on():
        user.say("control", largest.make(Hint))
        with attack.trying("hints"):
            user.settle(10 * ANSWER_S)


def send_forged(attack: Attack) -> None:
    """Every message with random fields forged, on every channel."""
    user = attack.join()
    while attack.goes_on():
        for at, kind in enumerate(attack.chance.sample(MESSAGES, len(MESSAGES)), 1):
            forged = forge_one((kind,), KNOWN, attack.chance)
            user.say(attack.chance.choice(["control", "express", "lifeline"]), forged)
            attack.done[f"random {forged.what.split('.')[0]}"] += 1
            if at % 20 == 0:
                with attack.trying("answered"):
                    user.settle(0.02)


def act_as(*acts: str) -> Callable[[Attack], None]:
    """Acts of the hostile user of the tests of domains (`tests/kit/hostile/user.py`)."""

    def act(attack: Attack) -> None:
        user = attack.join()
        while attack.goes_on():
            with attack.trying("acts"):
                user.act(list(acts))

    return act


def say_half(attack: Attack) -> None:
    """Half messages on all channels, and then silence."""
    held: deque[socket.socket] = deque(maxlen=HELD)
    place, user = attack.place, attack.join()
    frame = HELLO_GREETING + b"\x02" + struct.pack(">Q", FRAME_BYTES) + bytes(1 << 14)
    while attack.goes_on():
        for kind, address in ((socket.SOCK_STREAM, place.control), (socket.SOCK_SEQPACKET, place.socket)):
            connected = attack.connect(kind, address)
            if connected is not None:
                with contextlib.suppress(OSError):
                    connected.send(frame[: attack.chance.randrange(len(frame))] if address == place.control else b"")
                held.append(connected)
        if user.client is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(user.client.express.fileno())) as end:
                end.settimeout(0.1)
                end.sendall(struct.pack("<I", FRAME_BYTES) + bytes(1 << 16))
            with attack.trying("half frames"):
                user.join()


def bring_identities(attack: Attack) -> None:
    """One engine after the other, each with an identity of its own, a long report, and many ranks."""
    held: deque[RawClient] = deque()
    parts = tuple(IdentityField(name=f"f{at}", value="x" * 500) for at in range(MAX_IDENTITY))
    for number in count():
        if not attack.goes_on():
            return
        register = replace(
            WIDE,
            fingerprint=attack.chance.randbytes(HASH_BYTES),
            ranks=2**16 - 1,
            rank=attack.chance.randrange(2**16 - 1),
            identity=parts,
            report=b"x" * MAX_REPORT,
        )
        with attack.trying("identities"):
            held.append(RawClient(attack.place.path, register, engine=f"one of many {os.getpid()} {number}"))
        if len(held) > ENGINES:
            held.popleft().close()


def keep_everything(attack: Attack) -> None:
    """Leases and slots that are never given back, and one block that a request names 131,072 times."""
    client = attack.join().client
    assert client is not None
    hashes, space = hashes_of(1, seed=attack.chance.getrandbits(32)), client.name_space
    with attack.trying("saved"):
        save(client, hashes, 7)
    while attack.goes_on():
        for message in (
            AcquireEntries(name_space=space, group=0, hashes=hashes * MAX_BLOCKS),
            Acquire(name_space=space, chain=hashes),
            Credits(name_space=space, group=0, count=MAX_BATCH),
        ):
            with attack.trying(type(message).__name__):
                client.express.ask(message)


def churn(attack: Attack) -> None:
    """Connections opened and closed as fast as it goes, on all ways in."""
    place = attack.place
    ways = [(socket.SOCK_STREAM, place.control), (socket.SOCK_SEQPACKET, place.socket)]
    ways += [(socket.SOCK_STREAM, port) for port in (place.tcp, place.peers, place.web) if port]
    while attack.goes_on():
        for _ in range(20):
            connected = attack.connect(*attack.chance.choice(ways))
            if connected is not None:
                connected.close()


def drip(port: str, said: bytes) -> Callable[[Attack], None]:
    """Connections from several addresses that send a byte about once a second, renewed whenever they are closed."""

    def act(attack: Attack) -> None:
        held: dict[socket.socket, int] = {}
        while attack.goes_on():
            for _ in range(min(16, HELD - len(held))):
                connected = attack.connect(socket.SOCK_STREAM, getattr(attack.place, port))
                if connected is None:
                    break
                connected.setblocking(False)
                held[connected] = 0
            for connected, sent in list(held.items()):
                try:
                    with contextlib.suppress(BlockingIOError):
                        while connected.recv(1 << 12):
                            pass
                        raise ConnectionError
                    if attack.chance.random() < 0.05:
                        connected.send(said[sent : sent + 1] or b"x")
                        held[connected] = sent + 1
                        attack.done["bytes"] += 1
                except OSError:
                    connected.close()
                    del held[connected]
            time.sleep(0.05)

    return act


def try_wrong_keys(attack: Attack) -> None:
    """Clients and peers with keys that are not listed, and garbage at the port for links of peers."""
    while attack.goes_on():
        wanted = attack.place.server_key.encode() if attack.chance.random() < 0.5 else make_keys().public
        client = RemoteClient(f"tcp://127.0.0.1:{attack.place.tcp}", keys=make_keys(), server_key=wanted)
        client.socket.linger = 0
        client.socket.send(attack.chance.randbytes(100))
        connected = attack.connect(socket.SOCK_STREAM, attack.place.peers) if attack.place.peers else None
        if connected is not None:
            with contextlib.suppress(OSError), connected:
                connected.sendall(attack.chance.randbytes(4096))
        client.socket.poll(20)
        client.close()
        attack.done["wrong keys"] += 1


def end_in_the_middle(attack: Attack) -> None:
    """Processes that are killed in the middle of their calls, or stopped for seconds."""
    while attack.goes_on():
        if (pid := os.fork()) == 0:
            work_until_killed(attack)
        time.sleep(attack.chance.uniform(0.05, 0.5))
        if attack.chance.random() < 0.3:
            os.kill(pid, signal.SIGSTOP)
            attack.done["stopped"] += 1
            time.sleep(attack.chance.uniform(0.5, 2.0))
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        attack.done["killed"] += 1


def work_until_killed(attack: Attack) -> None:
    try:
        client = RawClient(attack.place.path, register_of(9), engine=f"mayfly {os.getpid()}")
        for seed in count():
            save(client, hashes_of(64, seed), 7)
            client.express.ask(Acquire(name_space=client.name_space, chain=hashes_of(64, seed)))
    finally:
        os._exit(1)


KINDS: dict[str, Callable[[Attack], None]] = {
    "largest": send_largest,
    "hash chain": hint_one_chain,
    "forged": send_forged,
    "half messages": say_half,
    "identities": bring_identities,
    "keeps all": keep_everything,
    "churn": churn,
    "holds, passes descriptors": act_as("hold", "read nothing", "greet"),
    "writes": act_as("write"),
    "slow bytes, web": drip("web", REQUEST),
    "slow bytes, tcp": drip("tcp", ZMTP),
    "wrong keys": try_wrong_keys,
    "kills": end_in_the_middle,
}


def main() -> None:
    kind, uid, seconds, seed, place = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    attack = Attack(Place(**json.loads(place)), int(seed), float(seconds))
    attack.goes_on()
    with attack.trying("whole attacks"):
        KINDS[kind](attack)
    print(json.dumps(attack.done), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
