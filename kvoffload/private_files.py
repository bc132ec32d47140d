"""The files of a private server while it lives, and the name by which its engines find it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvoffload.errors import ConfigError, TakenFolderError

logger = logging.getLogger(__name__)

_LONGEST_PATH = 107 - len(".control")
"""Longest path of the server's first socket. The kernel takes 107 bytes, and the second socket's path is longer by
`.control`."""

OWN_ROOMS = ("/run/user/{user}", "~")
"""Folders that are made for one user alone: by systemd, and the home."""


@dataclass(frozen=True)
class PrivateFiles:
    """All in one folder that is the user's alone. The server removes them as it ends, and the folder with the last."""

    socket: Path

    @classmethod
    def named(cls, room: Path, *parts: str) -> Self:
        """Below `room`, for this user. Equal parts in one pid namespace of one machine are the same server.

        ConfigError: the path is too long for a socket.
        """
        # The folder may be one that several machines or containers see.
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        whole = [machine, str(os.stat("/proc/self/ns/pid").st_ino), *parts]
        name = hashlib.sha256("\0".join(whole).encode()).hexdigest()[:12]
        socket = room / f"kvoffload-{os.getuid()}" / name
        if len(os.fsencode(socket)) > _LONGEST_PATH:
            raise ConfigError(
                f"{socket} is longer than the {_LONGEST_PATH} bytes that a private server's socket may have",
                remedy="let TMPDIR name a folder with a shorter path",
                path=str(socket),
            )
        return cls(socket)

    @classmethod
    def settled(cls, room: Path, *parts: str) -> Self:
        """The same, in a folder that is there. Where another user has taken its name in `room`, which anyone may write
        to, it is made in a folder that is this user's alone, so that every process finds it there.

        ConfigError: no folder can be used.
        """
        files = cls.named(room, *parts)
        try:
            files.make_folder()
        except TakenFolderError as taken:
            for own in _own_rooms():
                with contextlib.suppress(ConfigError):
                    elsewhere = cls.named(own, *parts)
                    elsewhere.make_folder()
                    logger.warning("%s: private servers are in %s instead", taken.message, elsewhere.folder)
                    return elsewhere
            raise
        return files

    @property
    def folder(self) -> Path:
        return self.socket.parent

    @property
    def start_lock(self) -> Path:
        """The holder of this lock may start the server; the server takes it before it ends by itself."""
        return self.socket.with_name(self.socket.name + ".start")

    @property
    def log(self) -> Path:
        """The file of all that the server writes. It stays when the server ends with a fault."""
        return self.socket.with_name(self.socket.name + ".log")

    def make_folder(self) -> None:
        """Makes the folder. ConfigError: it cannot be made, or is not this user's alone."""
        try:
            found = self._find_folder()
            while found is None:
                with contextlib.suppress(FileExistsError):
                    self.folder.mkdir(mode=0o700)
                found = self._find_folder()
        except OSError as fault:
            raise self._refuse(f"cannot be made: {fault.strerror}") from fault
        if found.st_uid != os.getuid():
            raise self._refuse(f"belongs to user {found.st_uid}, not to {os.getuid()}", TakenFolderError)
        if not stat.S_ISDIR(found.st_mode):
            raise self._refuse("is no folder")
        if found.st_mode & 0o077:
            raise self._refuse(f"has mode {stat.S_IMODE(found.st_mode):04o}, allowed is 0700")

    def remove_folder(self) -> None:
        """Removes the folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _find_folder(self) -> os.stat_result | None:
        """Looks at the folder. None: it is not there, or the last server of it has just removed it."""
        try:
            return self.folder.lstat()
        except FileNotFoundError:
            return None

    def _refuse(self, reason: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
        return kind(
            f"the folder {self.folder} for private servers {reason}",
            remedy="remove it, or let TMPDIR name another place",
            path=str(self.folder),
        )


def _own_rooms() -> Iterator[Path]:
    """Yields those of OWN_ROOMS that are there, belong to this user, and to which no other user may write."""
    user = os.getuid()
    for name in OWN_ROOMS:
        # RuntimeError: the user has no home.
        with contextlib.suppress(OSError, RuntimeError):
            room = Path(name.format(user=user)).expanduser()
            found = room.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
                yield room
