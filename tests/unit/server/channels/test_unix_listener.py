"""A path belongs to one server, with its mode, and to the next one when that has died."""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffload.errors import ConfigError
from kvoffload.server.channels.unix_listener import UnixListener
from tests.kit.children import child

SERVER = """
import sys, time
from pathlib import Path
from kvoffload.server.channels.unix_listener import UnixListener
listener = UnixListener(Path(sys.argv[1]))
print("listens", flush=True)
time.sleep(600)
"""


def connect(path: Path) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(str(path))
    return end


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_socket_has_its_mode_and_the_umask_stays(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o027)
    os.umask(before)
    listener = UnixListener(tmp_path / "s", mode=mode, group=os.getgid())
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
    assert os.umask(before) == before
    with connect(tmp_path / "s"):
        accepted = listener.accept()
        assert accepted is not None
        accepted.close()
    assert listener.accept() is None
    listener.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    first = UnixListener(tmp_path / "s")
    with pytest.raises(ConfigError, match="s is another server's"):
        UnixListener(tmp_path / "s")
    with connect(tmp_path / "s"):
        pass
    first.close()
    UnixListener(tmp_path / "s").close()


def test_who_stops_listening_has_the_path_until_it_closes(tmp_path: Path) -> None:
    first = UnixListener(tmp_path / "s")
    first.stop()
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "s")
    with pytest.raises(ConfigError, match="another server"):
        UnixListener(tmp_path / "s")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(UnixListener, tmp_path / "s", wait_s=60)
        first.close()
        second = waiting.result()
    with connect(tmp_path / "s"):
        pass
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with child(["-c", SERVER, str(path)], says="listens"), pytest.raises(ConfigError, match="another server"):
        UnixListener(path)
    assert path.is_socket()
    listener = UnixListener(path)
    with connect(path):
        pass
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_cannot_have_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(ConfigError, match="cannot be given to group 7: Operation not permitted; name a group"):
        UnixListener(tmp_path / "s", group=7)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path, reason in (
        (tmp_path / "none" / "s", "cannot be used: No such file"),
        (tmp_path / ("x" * 120), "cannot be used: "),
        (tmp_path / "file", "is no socket"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            UnixListener(path)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "kept"
