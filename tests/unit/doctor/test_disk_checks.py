"""Folders that are not there, not ours, open to others, too small, or without O_DIRECT."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvoffload.doctor.disk_checks import check_disks, check_folder
from kvoffload.doctor.findings import Verdict
from kvoffload.units import GIB, MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "blocks"
    made.mkdir(mode=0o700)
    return made


def has_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "try", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_folder_of_ours_is_well_and_is_left_as_it_was(folder: Path) -> None:
    wanted = Verdict.OK if has_direct(folder) else Verdict.WARN
    before = sorted(folder.iterdir())
    found = check_folder(folder, MIB)
    assert found.verdict is wanted, found
    assert sorted(folder.iterdir()) == before


def test_one_that_is_not_there(tmp_path: Path) -> None:
    found = check_folder(tmp_path / "none", MIB)
    assert (found.verdict, found.text) == (Verdict.FAIL, "No such file or directory")
    assert found.remedy == f"install -d -m 0700 {tmp_path / 'none'}"


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is no folder" in check_folder(tmp_path / "file", MIB).text


def test_one_that_others_may_enter(folder: Path) -> None:
    folder.chmod(0o750)
    found = check_folder(folder, MIB)
    assert found.verdict is Verdict.FAIL
    assert "has mode 0750" in found.text
    assert found.remedy == f"chmod 0700 {folder}"


def test_a_folder_of_another_user_fails(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may give a folder away")
    os.chown(folder, 12345, 12345)
    found = check_folder(folder, MIB)
    assert found.verdict is Verdict.FAIL
    assert "belongs to user 12345" in found.text


def test_one_on_a_device_that_is_too_small(folder: Path) -> None:
    found = check_folder(folder, 1 << 60)
    assert found.verdict is Verdict.FAIL
    assert "may take" in found.text


def test_what_is_there_already_counts_as_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "extent").open("wb") as file:
        file.truncate(2 * GIB)
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: nothing)
    assert check_folder(folder, 2 * GIB).verdict is not Verdict.FAIL
    found = check_folder(folder, 2 * GIB + 1)
    assert found.verdict is Verdict.FAIL
    assert found.remedy == "kvoffload serve --set disk_size=1GiB"


def test_less_room_than_a_disk_may_have_needs_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    found = check_folder(folder, GIB)
    assert found.text == "has room for 64MiB, and may take 1GiB"
    assert found.remedy == f"name a folder with more room than {folder} has"


def test_one_without_direct_access(folder: Path) -> None:
    def refuse(path: Path, flags: int) -> int:
        assert flags & os.O_DIRECT
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    [found] = check_disks([folder], MIB, open_file=refuse)
    assert found.verdict is Verdict.WARN
    assert "has no O_DIRECT (Invalid argument)" in found.text
