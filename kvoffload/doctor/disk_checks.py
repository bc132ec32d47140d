"""Folders of the disk tier: whether they are there, ours, large enough, and read past the kernel's cache."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.given import NOTHING, Given
from kvoffload.units import describe_size

Open = Callable[[Path, int], int]


def check_disks(
    folders: Sequence[Path], size_bytes: int, given: Given = NOTHING, *, open_file: Open = os.open
) -> Iterator[Finding]:
    """Checks the folders of a disk tier; `size_bytes` is what each may take."""
    for folder in folders:
        yield check_folder(folder, size_bytes, given, open_file=open_file)


def check_folder(folder: Path, size_bytes: int, given: Given = NOTHING, *, open_file: Open = os.open) -> Finding:
    check = f"disk {folder}"
    refused = _check_owner(check, folder)
    if refused is not None:
        return refused
    room = os.statvfs(folder)
    had_bytes = sum(one.stat().st_size for one in folder.iterdir() if one.is_file())
    free_bytes = room.f_bavail * room.f_frsize + had_bytes
    if free_bytes < size_bytes:
        half = free_bytes // 2 >> 30
        return fail(
            check,
            f"has room for {describe_size(free_bytes)}, and may take {describe_size(size_bytes)}",
            given.change("disk_size", f"{half}GiB") if half else f"name a folder with more room than {folder} has",
        )
    problem = try_direct(folder, open_file)
    if problem:
        return warn(
            check,
            f"has no O_DIRECT ({problem}): bytes pass through the kernel's cache when they are written and read",
            f"name a folder on ext4 or XFS; to see this one's file system: findmnt -T {folder}",
        )
    return ok(
        check, f"room for {describe_size(free_bytes)}, of which {describe_size(size_bytes)} may be used; O_DIRECT"
    )


def _check_owner(check: str, folder: Path) -> Finding | None:
    try:
        found = folder.stat()
    except OSError as fault:
        return fail(check, f"{fault.strerror}", f"install -d -m 0700 {folder}")
    if not stat.S_ISDIR(found.st_mode):
        return fail(check, "is no folder", f"rm {folder} && install -d -m 0700 {folder}")
    if found.st_uid != os.geteuid():
        return fail(check, f"belongs to user {found.st_uid}, not to {os.geteuid()}", f"chown {os.geteuid()} {folder}")
    if found.st_mode & 0o077:
        return fail(check, f"has mode {stat.S_IMODE(found.st_mode):04o}: others could come in", f"chmod 0700 {folder}")
    return None


def try_direct(folder: Path, open_file: Open) -> str:
    """Why a file there cannot be written past the kernel's cache; empty if it can."""
    path = folder / f".kvoffload-doctor-{uuid.uuid4().hex}"
    try:
        file = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC)
        os.close(file)
    except OSError as fault:
        return str(fault.strerror)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return ""
