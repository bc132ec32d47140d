"""Why a connection to a server's socket cannot be had, as a line for whoever has to mend it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_REASONS = {
    errno.ENOENT: "is not there",
    errno.ECONNREFUSED: "is a socket that a server has left: nobody listens on it",
    errno.EAGAIN: "takes no connection now: its server hangs, or very many are before us",
    errno.EPROTOTYPE: "is a socket of another program",
}


def explain_unreached(path: Path, fault: OSError) -> str:
    """`fault`: what connecting to `path` raised. Looks at the file system, so it says what is true now."""
    if isinstance(fault, PermissionError):
        with contextlib.suppress(OSError):  # it may be gone by now
            return _refused(path)
    why = _REASONS.get(fault.errno or 0, "cannot be reached: " + (fault.strerror or str(fault)))
    if isinstance(fault, ConnectionRefusedError) and path.exists() and not path.is_socket():
        why = "is no socket"
    return f"{path} {why}"


def _may_pass(folder: Path) -> bool:
    return os.access(folder, os.X_OK, effective_ids=True)


def _refused(path: Path) -> str:
    """By its mode, or by that of a folder that it is in; with one id or the other."""
    folder = next((one for one in reversed(path.parents) if not _may_pass(one)), None)
    found = (folder or path).stat()
    groups = sorted({os.getegid(), *os.getgroups()})
    own = f"group {groups[0]}" if len(groups) == 1 else f"groups {', '.join(map(str, groups))}"
    return (
        f"{path} may not be used by this process, which is of user {os.geteuid()} and {own}: "
        f"{'it' if folder is None else folder} has mode {stat.S_IMODE(found.st_mode):04o}, user {found.st_uid} and "
        f"group {found.st_gid}"
    )
