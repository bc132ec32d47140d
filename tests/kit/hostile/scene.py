"""A server with two domains, an honest client of one, and a hostile user of the other: a user and a process each."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack

from tests.kit.children import child
from tests.kit.hostile.forging import LIVE_LEASES, LIVE_TICKETS, Forged, Known

HONEST, HOSTILE = 61_001, 61_002
BLOCKS = 64
JOINED_ONCE = 200
"""How often one process of the hostile user joins, about."""
ACTS = ("forge", "write", "hold", "read nothing", "greet")
SERVER = f"""
import logging, sys
from pathlib import Path
from kvoffload.cache import CacheSettings
from kvoffload.server import DomainSettings
from kvoffload.server.loop import CacheServer, ServerPlan
logging.basicConfig(filename=sys.argv[1] + ".faults", level=logging.ERROR)
memory = CacheSettings(memory_bytes=64 << 20, segment_bytes=64 << 20)
red = DomainSettings(name="red", uids=frozenset({{{HONEST}}}))
blue = DomainSettings(name="blue", uids=frozenset({{{HOSTILE}}}))
plan = ServerPlan(
    socket=Path(sys.argv[1]), memory={{"red": memory, "blue": memory}}, domains=(red, blue), mode=0o666
)
server = CacheServer(plan)
print(server.boot_id, flush=True)
server.run()
"""


RIGHT = {
    "protocol_min": 1,
    "protocol_max": 1,
    "name_space": 0,
    "group": 0,
    "shard": 0,
    "more_shards": 0,
    "count": 0,
    "local": 0,
    "limit": 2**64 - 1,
    "first": 0,
    "shards": (),
    "fingerprint": bytes([9]) * 32,
    "hash_algorithm": "sha256",
    "hash_seed": b"",
    "hash_block_size": 16,
    "groups": ((4096, 16, 0, 0, 1),),
    "rank": 0,
    "tenant": "",
    "identity": (),
    "leases": b"".join(lease.to_bytes(8, "little") for lease in LIVE_LEASES),
}
"""By field, what lets a message be looked at to its end: the hostile user's own identity has one group of one rank."""


class Scene:
    """All that is said to the two goes by their pipes, so a test decides who does what when."""

    def __init__(self, path: Path, server: subprocess.Popen[str], honest: subprocess.Popen[str], boot_id: int) -> None:
        self._path = path
        self._server = server
        self._honest = honest
        self._faults_read = 0
        told = self._read_line()
        self.known = Known(
            numbers=(*LIVE_TICKETS, *LIVE_LEASES, boot_id, *told["numbers"]),
            hashes=tuple(bytes.fromhex(told["hashes"][at : at + 64]) for at in range(0, len(told["hashes"]), 64)),
            names=(told["domain"], "blue"),
            fields=RIGHT,
        )

    def check(self) -> dict[str, int]:
        """Checks what the honest client has."""
        return self.tell_honest("check")  # type: ignore[no-any-return]

    def tell_honest(self, command: str) -> Any:
        self.ask_honest(command)
        return self.hear_honest()

    def ask_honest(self, command: str) -> None:
        assert self._honest.stdin is not None
        self._honest.stdin.write(f"{command}\n")
        self._honest.stdin.flush()

    def hear_honest(self) -> Any:
        return self._read_line()

    def is_served(self) -> bool:
        return self._server.poll() is None

    def read_faults(self) -> str:
        """Reads the new lines of the log of the server's own faults."""
        whole = self._path.with_name("s.faults").read_text()
        new, self._faults_read = whole[self._faults_read :], len(whole)
        return new

    def measure_rss_bytes(self) -> int:
        """Measures the server's memory, without what is shared."""
        pages = Path(f"/proc/{self._server.pid}/statm").read_text().split()
        return (int(pages[1]) - int(pages[2])) * resource.getpagesize()

    def count_files(self) -> int:
        return len(os.listdir(f"/proc/{self._server.pid}/fd"))

    @contextmanager
    def hostile(self) -> Iterator[HostileProcess]:
        made = HostileProcess(self._path, self.known)
        try:
            yield made
        finally:
            made.close()

    def _read_line(self) -> Any:
        assert self._honest.stdout is not None
        line = self._honest.stdout.readline()
        assert line, "the honest client has ended"
        return json.loads(line)


class HostileProcess:
    """Processes of the hostile user, one after the other: a server gives one user a limited number of sessions, and
    those that hold something end with their process.

    `begin` and `end` are the halves of `act`: it keeps acting while the test does something else.
    """

    def __init__(self, path: Path, known: Known) -> None:
        self._path = path
        self._known = known
        self._joined = 0
        self._running = ExitStack()
        self.own: dict[str, Any] = {}
        self._start()

    def close(self) -> None:
        self._running.close()

    def say(self, messages: Sequence[tuple[str, Forged]]) -> dict[str, int]:
        """On these channels, and until all of it has been read. How much of it was served on the control channel, and
        how much refused."""
        self._begin_anew()
        packed = [(channel, one.what, one.op, one.is_one_way, one.fields, one.head) for channel, one in messages]
        self._send(("say", packed))
        return self.end()

    def act(self, *acts: str) -> dict[str, Any]:
        self.begin(*acts)
        return self.end()

    def compute(self) -> None:
        """Computes for a few milliseconds, and does nothing else."""
        self._send(("compute", ()))
        self.end()

    def begin(self, *acts: str) -> None:
        self._begin_anew()
        self._send(("act", acts))

    def end(self) -> dict[str, Any]:
        found, self._joined = self._receive()
        return dict(found)

    def _begin_anew(self) -> None:
        """Starts a new process if it is time to."""
        if self._joined >= JOINED_ONCE:
            self.close()
            self._start()

    def _start(self) -> None:
        command = ["-m", "tests.kit.hostile.user", str(self._path), str(HOSTILE)]
        process = self._running.enter_context(child(command))
        assert process.stdin is not None
        assert process.stdout is not None
        self._commands = process.stdin.buffer
        self._answers = process.stdout.buffer
        self._unpacker = msgpack.Unpacker(use_list=False)
        known = self._known
        self._send((known.numbers, known.hashes, known.names, known.fields))
        self.own = self.end()
        assert self.own["name_space"] == known.fields["name_space"]

    def _send(self, value: Any) -> None:
        self._commands.write(msgpack.packb(value))
        self._commands.flush()

    def _receive(self) -> Any:
        while True:
            for value in self._unpacker:
                return value
            data = os.read(self._answers.fileno(), 1 << 16)
            assert data, "the hostile user has ended"
            self._unpacker.feed(data)


@contextmanager
def open_scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "s"
        with child(["-c", SERVER, str(path)]) as server:
            assert server.stdout is not None
            boot_id = int(server.stdout.readline())
            with child(["-m", "tests.kit.hostile.honest", str(path), str(HONEST), str(BLOCKS)]) as honest:
                yield Scene(path, server, honest, boot_id)
