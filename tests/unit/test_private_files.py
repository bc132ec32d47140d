"""Where a private server is found, and by whom alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffload import private_files
from kvoffload.errors import ConfigError, TakenFolderError
from kvoffload.private_files import PrivateFiles

OTHER = 64_003
"""A user that has no folder of its own."""


def test_equal_parts_are_the_same_server(tmp_path: Path) -> None:
    first = PrivateFiles.named(tmp_path, "a", "b")
    assert first == PrivateFiles.named(tmp_path, "a", "b")
    others = [PrivateFiles.named(tmp_path, *parts) for parts in ((), ("ab",), ("a", "b", ""), ("b", "a"))]
    assert len({first, *others}) == 5
    assert first.folder == tmp_path / f"kvoffload-{os.getuid()}"
    assert len({first.socket, first.start_lock, first.log}) == 3
    assert {first.start_lock.parent, first.log.parent} == {first.folder}
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    short = 107 - len(".control") - len(os.fsencode(PrivateFiles.named(tmp_path).socket))
    PrivateFiles.named(tmp_path / ("x" * (short - 1)))
    with pytest.raises(ConfigError, match=r"longer than the 99 bytes .* shorter path"):
        PrivateFiles.named(tmp_path / ("x" * short))


def test_the_folder_is_made_once_and_goes_when_it_is_empty(tmp_path: Path) -> None:
    files = PrivateFiles.named(tmp_path)
    files.make_folder()
    files.make_folder()
    assert files.folder.stat().st_mode & 0o777 == 0o700
    files.log.touch()
    files.remove_folder()
    assert files.folder.exists()
    files.log.unlink()
    files.remove_folder()
    files.remove_folder()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_its_last_server_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PrivateFiles.named(tmp_path)
    mkdir, removals = Path.mkdir, iter(("before", "after", "after"))

    def mkdir_beside_a_server_that_ends(folder: Path, mode: int) -> None:
        when = next(removals, "not")
        if when == "before":
            # It was there when this was called, and is not when it is looked at.
            raise FileExistsError
        mkdir(folder, mode)
        if when == "after":
            files.remove_folder()

    monkeypatch.setattr(Path, "mkdir", mkdir_beside_a_server_that_ends)
    files.make_folder()
    assert list(removals) == []
    assert files.folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PrivateFiles.named(tmp_path)

    def assert_refused(reason: str) -> None:
        with pytest.raises(ConfigError, match=reason) as caught:
            files.make_folder()
        assert "\n" not in str(caught.value)

    files.folder.write_text("")
    assert_refused("is no folder")
    files.folder.unlink()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    files.folder.symlink_to(tmp_path / "elsewhere")
    assert_refused("is no folder")
    files.folder.unlink()
    files.folder.mkdir(mode=0o700)
    files.folder.chmod(0o770)
    assert_refused("has mode 0770, allowed is 0700")
    files.folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    assert_refused(f"belongs to user {os.geteuid()}, not to {OTHER}")
    files = PrivateFiles.named(tmp_path / "none")
    assert_refused("cannot be made: No such file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users")
def test_a_name_that_another_user_has_taken_keeps_nobody_from_a_private_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken, home = PrivateFiles.named(tmp_path).folder, tmp_path / "home"
    taken.mkdir(mode=0o777)
    os.chown(taken, OTHER, OTHER)
    home.mkdir(mode=0o700)
    monkeypatch.setattr(private_files, "OWN_ROOMS", (str(tmp_path / "none"), str(home)))
    first = PrivateFiles.settled(tmp_path, "a")
    assert first.folder == home / taken.name
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert PrivateFiles.settled(tmp_path, "a") == first
    assert caplog.messages[0].endswith(
        f"belongs to user {OTHER}, not to {os.getuid()}: private servers are in {first.folder} instead"
    )
    # A home to which others may write could be taken likewise.
    first.remove_folder()
    home.chmod(0o770)
    with pytest.raises(TakenFolderError, match=f"belongs to user {OTHER}"):
        PrivateFiles.settled(tmp_path, "a")
    taken.rmdir()
    assert PrivateFiles.settled(tmp_path, "a").folder == taken
