"""The process moves what it is told to, between its client and memory that is shared; and ends with the other end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from kvoffload.tiers.mooncake_child import Child


class Client:
    """Is as Mooncake's client, of one value."""

    def __init__(self) -> None:
        self.value = b""
        self.told: list[tuple[object, ...]] = []

    def setup(self, *words: object) -> int:
        self.told.append(words)
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.told.append(("register", size))
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.told.append(("unregister",))
        return 0

    def batch_put_from(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        import ctypes

        self.value = ctypes.string_at(places[0], sizes[0])
        return [0]

    def batch_get_into(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        import ctypes

        ctypes.memmove(places[0], self.value, len(self.value))
        return [len(self.value)]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [1 for _ in keys]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [0 if force else -706 for _ in keys]


def test_records_go_through_memory_that_is_shared() -> None:
    client = Client()
    memory = os.memfd_create("test")
    child = Child(client, memory)
    assert child.verbs["setup"]("here", "P2PHANDSHAKE", "tcp", "", "far:1") == 0
    assert client.told[0][2] == 0, "it offers no memory of its own"
    os.ftruncate(memory, 8192)
    assert child.verbs["map"](4096) == 0
    assert child.verbs["map"](8192) == 0
    assert client.told[1:] == [("register", 4096), ("unregister",), ("register", 8192)]
    os.pwrite(memory, b"a record", 100)
    assert child.verbs["put"](["key"], [100], [8]) == [0]
    assert child.verbs["get"](["key"], [5000], 8) == [8]
    assert os.pread(memory, 8, 5000) == b"a record"
    assert (child.verbs["look"](["key"]), child.verbs["remove"](["key"])) == ([1], [0])
    os.close(memory)


def test_it_ends_with_the_other_end_whatever_its_client_would_still_do(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/store.py").write_text(
        "import atexit, time\n"
        "atexit.register(time.sleep, 3600)\n"
        "class MooncakeDistributedStore:\n"
        "    def setup(self, *words): return 7\n"
        "    def batch_is_exist(self, keys): return [1]\n"
    )
    link, end = socket.socketpair()
    memory = os.memfd_create("test")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from kvoffload.tiers.mooncake_child import main; "
    code += "main(int(sys.argv[2]), int(sys.argv[3]), 1.0)"
    command = [sys.executable, "-c", code, str(tmp_path), str(end.fileno()), str(memory)]
    with subprocess.Popen(command, pass_fds=(end.fileno(), memory)) as process:
        end.close()
        answers = link.makefile("rb")
        assert json.loads(answers.readline()) == {"answer": "ready"}
        for asked, answer in ((["setup", "", "", "", "", ""], 7), (["look", ["key"]], [1])):
            link.sendall(json.dumps(asked).encode() + b"\n")
            assert json.loads(answers.readline()) == {"answer": answer}
        answers.close()
        link.close()
        assert process.wait(60) == 0
    os.close(memory)


def test_without_the_library_it_says_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").write_text("raise ImportError('there is none')")
    link, end = socket.socketpair()
    memory = os.memfd_create("test")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from kvoffload.tiers.mooncake_child import main; "
    code += "main(int(sys.argv[2]), int(sys.argv[3]), 1.0)"
    command = [sys.executable, "-c", code, str(tmp_path), str(end.fileno()), str(memory)]
    done = subprocess.run(command, pass_fds=(end.fileno(), memory), check=True, capture_output=True, timeout=60)
    end.close()
    os.close(memory)
    assert json.loads(link.recv(1000)) == {"fault": "Mooncake's client cannot be loaded: there is none"}
    assert done.returncode == 0
    link.close()
