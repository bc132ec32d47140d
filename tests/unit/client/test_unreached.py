"""Each reason why a socket does not answer is told as itself, with what is needed to mend it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffload.client.unreached import explain_unreached
from kvoffload.client.wire import SocketWire

NOBODY = 65534


@contextmanager
def listening(path: Path, kind: int = socket.SOCK_SEQPACKET) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, kind) as end:
        end.bind(str(path))
        end.listen(0)
        yield


@contextmanager
def no_superuser() -> Iterator[int]:
    """Within it this process is of a user who may be refused something; gives whose."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(NOBODY)
    try:
        yield os.geteuid()
    finally:
        if uid == 0:
            os.seteuid(uid)


def dial(path: Path) -> str:
    wire = SocketWire(path)
    try:
        return wire.dial()
    finally:
        wire.close()


def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    assert dial(tmp_path / "s") == f"{tmp_path}/s is not there"
    assert dial(tmp_path / "folder" / "s") == f"{tmp_path}/folder/s is not there"


def test_what_was_refused_and_is_gone_by_now(tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    assert explain_unreached(tmp_path / "s", refused) == f"{tmp_path}/s cannot be reached: Permission denied"


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    assert dial(tmp_path / "s") == f"{tmp_path}/s is no socket"


def test_a_socket_that_a_dead_server_left(tmp_path: Path) -> None:
    with listening(tmp_path / "s"):
        assert dial(tmp_path / "s") == ""
    assert dial(tmp_path / "s") == f"{tmp_path}/s is a socket that a server has left: nobody listens on it"


def test_a_socket_of_another_program(tmp_path: Path) -> None:
    with listening(tmp_path / "s", socket.SOCK_STREAM):
        assert "of another program" in dial(tmp_path / "s")


def test_a_server_that_takes_no_connection(tmp_path: Path) -> None:
    with listening(tmp_path / "s"):
        wires = [SocketWire(tmp_path / "s") for _ in range(3)]
        told = [wire.dial() for wire in wires]
        assert "takes no connection" in told[-1]
        for wire in wires:
            wire.close()


def test_a_socket_whose_mode_refuses_us_tells_both_ids(open_folder: Path) -> None:
    path = open_folder / "s"
    with listening(path):
        path.chmod(0)
        with no_superuser() as uid:
            told = dial(path)
    assert told.startswith(f"{path} may not be used by this process, which is of user {uid} and group")
    assert told.endswith(f": it has mode 0000, user {os.geteuid()} and group {os.getegid()}")


def test_a_folder_that_nobody_may_enter_is_named(open_folder: Path) -> None:
    folder = open_folder / "closed"
    folder.mkdir()
    with listening(folder / "s"):
        folder.chmod(0)
        with no_superuser():
            told = dial(folder / "s")
        folder.chmod(0o700)
    assert f": {folder} has mode 0000, " in told


def test_what_is_not_known_by_name_is_told_in_the_systems_words(tmp_path: Path) -> None:
    with listening(tmp_path / "s"):
        assert explain_unreached(tmp_path / "s", OSError(5, "Input/output error")).endswith(": Input/output error")


def test_a_path_that_is_too_long_is_told_too(tmp_path: Path) -> None:
    assert "too long" in dial(tmp_path / ("x" * 200))
