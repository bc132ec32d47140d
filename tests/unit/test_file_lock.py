"""One owner at a time, however an owner ends, and even if the file is removed."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffload.file_lock import FileLock
from tests.kit.children import child

OWNER = """
import sys
from pathlib import Path
from kvoffload.file_lock import FileLock
lock = FileLock.take(Path(sys.argv[1]))
print("has it", flush=True)
sys.stdin.read()
"""


def test_one_has_it_at_a_time(tmp_path: Path) -> None:
    first = FileLock.take(tmp_path / "lock")
    assert first is not None
    assert FileLock.take(tmp_path / "lock") is None
    first.close()
    first.close()
    second = FileLock.take(tmp_path / "lock")
    assert second is not None
    second.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_has_it_no_more(tmp_path: Path) -> None:
    with child(["-c", OWNER, str(tmp_path / "lock")], says="has it") as owner:
        assert FileLock.take(tmp_path / "lock") is None
        owner.kill()
        owner.wait()
        assert FileLock.take(tmp_path / "lock") is not None


def test_who_waits_gets_it_even_if_the_file_is_removed(tmp_path: Path) -> None:
    first = FileLock.take(tmp_path / "lock")
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(FileLock.take, tmp_path / "lock", wait_s=60)
        first.remove()
        second = waiting.result()
    assert second is not None
    assert FileLock.take(tmp_path / "lock") is None
    second.remove()


def test_never_two_while_all_remove_it(tmp_path: Path) -> None:
    inside = threading.Lock()

    def enter(_: int) -> None:
        lock = FileLock.take(tmp_path / "lock", wait_s=60)
        assert lock is not None
        assert inside.acquire(blocking=False)
        inside.release()
        lock.remove()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(200)))
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_left_to_another_process(tmp_path: Path) -> None:
    lock = FileLock.take(tmp_path / "lock")
    assert lock is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()]) as heir:
        lock.leave()
        assert FileLock.take(tmp_path / "lock") is None
        assert heir.stdin is not None
        heir.stdin.close()
        heir.wait()
    assert FileLock.take(tmp_path / "lock") is not None


def test_who_lets_go_does_so_for_all_copies(tmp_path: Path) -> None:
    lock = FileLock.take(tmp_path / "lock")
    assert lock is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()]):
        lock.close()
        assert FileLock.take(tmp_path / "lock") is not None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock.take(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()
