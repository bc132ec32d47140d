"""A private server's end: when it ends, so that no engine that looks for it is lost, and which files it removes."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass

from kvoffload.file_lock import FileLock
from kvoffload.private_files import PrivateFiles

logger = logging.getLogger(__name__)

LOG_BYTES = 1 << 20
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class EndingSettings:
    """How long a private server waits while no engine uses it."""

    linger_s: float
    """Seconds for which it stays after its last engine has ended, so that a new one finds the cache again."""
    first_engine_s: float
    """Seconds from its start within which the first engine must come."""


class Ending:
    """Decides when a private server should end: its last engine has ended or none has come, and no new one has come
    since.

    Belongs to the thread of the event loop.
    """

    def __init__(self, settings: EndingSettings, now_ns: int) -> None:
        self._settings = settings
        self._until_ns: int | None = now_ns + int(settings.first_engine_s * _NS_PER_S)
        """Time at which the server should end, or None while engines use it."""

    def is_due(self, now_ns: int, *, is_used: bool) -> bool:
        """Returns whether the server should end. The caller asks periodically and whenever an engine has come: an
        engine that came and went unseen does not count."""
        if is_used:
            self._until_ns = None
        elif self._until_ns is None:
            self._until_ns = now_ns + int(self._settings.linger_s * _NS_PER_S)
        return self._until_ns is not None and now_ns >= self._until_ns


@dataclass(frozen=True, kw_only=True)
class PrivateSettings:
    """The settings of a private server: its files, and when it ends."""

    files: PrivateFiles
    ending: EndingSettings


class PrivateLife:
    """Belongs to the thread of the event loop.

    An engine that cannot reach the server takes the start lock, tries again, and starts a server. So when a server
    holds the lock and has served all engines that came before, no other engine is about to connect, and it may end.
    """

    def __init__(self, settings: PrivateSettings, now_ns: int) -> None:
        self._files = settings.files
        self._ending = Ending(settings.ending, now_ns)
        self._lock: FileLock | None = None

    def is_due(self, now_ns: int, *, is_used: bool) -> bool:
        """Whether the server should end, as `Ending` decides."""
        return self._ending.is_due(now_ns, is_used=is_used)

    def hold_start(self) -> bool:
        """Takes the start lock, so that no engine starts a server of this name. False: an engine is about to start one;
        try again later."""
        try:
            self._lock = FileLock.take(self._files.start_lock)
        except OSError as fault:
            # The folder is gone, and the server cannot be found any more.
            logger.warning("no engine can find this server: %s", fault)
            return True
        return self._lock is not None

    def free_start(self) -> None:
        """Gives the start lock back, because an engine has come."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def bound_log(self) -> None:
        """Empties the log file when it is too long. That is safe because the file is open in append mode."""
        with contextlib.suppress(OSError):
            if self._files.log.stat().st_size > LOG_BYTES:
                os.truncate(self._files.log, 0)
                logger.warning("the log was longer than %d bytes and was emptied", LOG_BYTES)

    def close(self, *, is_clean: bool) -> None:
        """Removes the server's files, after everything else is closed. If an engine holds the start lock, the files
        belong to the server that it starts, and stay."""
        if self._lock is None and not self.hold_start():
            return
        if is_clean:
            with contextlib.suppress(OSError):
                self._files.log.unlink()
        if self._lock is not None:
            self._lock.remove()
        self._files.remove_folder()
