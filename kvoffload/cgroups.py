"""Reads the limits that bind this process from the files of its own cgroup, and of all cgroups above it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def read_limits(controller: str, *, unified: str, divided: tuple[str, ...], root: Path) -> Iterator[list[str]]:
    """Yields the words of a limit for each cgroup that may have it, the process's own cgroup first.

    `unified` is the limit's file in the unified hierarchy, `divided` are its files in the older one, where a controller
    has a hierarchy of its own. A file that cannot be read has no words. `root` is where `proc` and `sys` are.
    """
    mounts = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_unified = number == "0" and not controllers
        if not is_unified and controller not in controllers.split(","):
            continue
        top = mounts if is_unified else mounts / controllers
        group = PurePosixPath(path.strip("/"))
        for above in (group, *group.parents):
            files = (unified,) if is_unified else divided
            yield [word for file in files for word in read_text(top / above / file).split()]


def read_text(file: Path) -> str:
    """Returns a file's text, or nothing if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
