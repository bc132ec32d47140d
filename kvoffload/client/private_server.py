"""The private server of an engine: found, or started by the first of its processes that looks for it.

    starter ── start lock ──► launcher ──► server ── listens ── closes its copy of the lock ── says so
       └─ waits for that line, or for the end of its pipe: the server has died, and its log says why

The server has a copy of the starter's lock for as long as it starts. So only one starts at a time, and the next process
finds it or starts another, even if the starter was killed.

The server reads its settings from its standard input: other users of the machine can read a command line, and an
address in a setting may have a password in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from kvoffload import __version__
from kvoffload.client.wire import explain_unreached
from kvoffload.config.sources import Settings, format_served
from kvoffload.cpus import engine_cpus
from kvoffload.errors import PrivateServerError
from kvoffload.file_lock import FileLock
from kvoffload.private_files import PrivateFiles

START_TIMEOUT_S = 60.0
LAUNCHER = Path(__file__).with_name("launcher.py")
_REASON_BYTES = 4096


def find_or_start(
    settings: Settings,
    room: Path,
    *,
    key: str = "",
    holds_memory: bool = False,
    timeout_s: float = START_TIMEOUT_S,
    first_engine_s: float | None = None,
    engine_bytes: int = 0,
) -> Path:
    """Returns the socket of a private server that listens now, and starts the server if there is none.

    `room` is where this user's folder for private servers is made, such as the folder for temporary files. Processes of
    one user with the same settings and the same `key` have the same server. With `holds_memory`, a new server waits for
    an offer of an old one's memory before it takes its own; for its first engine it waits `first_engine_s`. A new one
    whose memory is `auto` goes by `engine_bytes`, which its engines cache themselves; 0: unknown.

    Blocks for at most `timeout_s`: a millisecond for a server that is there, an interpreter's start for a new one.

    The server may end between this answer and the greeting: a process that is not welcomed calls this again.

    ConfigError: the folder cannot be used. PrivateServerError: no server can be had, and why.
    """
    until = time.monotonic() + timeout_s
    if not sys.executable:
        raise PrivateServerError(
            "there is no Python to run a private server with", remedy="run `kvoffload serve`, and set `server`"
        )
    try:
        return _find_or_start(
            settings,
            room,
            key=key,
            holds_memory=holds_memory,
            until=until,
            first_engine_s=first_engine_s,
            engine_bytes=engine_bytes,
        )
    except OSError as fault:
        # This process may open no more files, or the machine has no memory left.
        raise _refuse(fault.strerror or str(fault)) from fault


def _find_or_start(
    settings: Settings,
    room: Path,
    *,
    key: str,
    holds_memory: bool,
    until: float,
    first_engine_s: float | None,
    engine_bytes: int,
) -> Path:
    served = format_served(settings)
    # The folder is looked at before anything in it is trusted.
    files = PrivateFiles.settled(room, __version__, key, *served.values())
    if is_listening(files.socket):
        return files.socket
    lock = _take_start_lock(files, until)
    try:
        if is_listening(files.socket):
            lock.close()
            return files.socket
        options = [] if holds_memory else ["--adopt-wait=0"]
        options += [] if first_engine_s is None else [f"--first-engine-within={first_engine_s}"]
        options += [f"--engine-cache={engine_bytes}"] if engine_bytes else []
        # The socket's path tells people which server it is.
        options += ["--set", f"server={files.socket}"]
        given = {"log_level": settings.log_level, **served}
        _start(files, lock, options, json.dumps(given).encode(), until)
    except BaseException:
        # A server may have begun to start.
        lock.leave()
        raise
    lock.close()
    return files.socket


def is_listening(path: Path) -> bool:
    """Whether a connection to a socket can be had. PrivateServerError: this process may not even try."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as end:
        try:
            end.connect(str(path))
        except BlockingIOError:
            # Many are before us.
            return True
        except OSError as fault:
            if fault.errno in (errno.ENOENT, errno.ECONNREFUSED):
                return False
            raise PrivateServerError(
                f"the private server cannot be reached: {explain_unreached(path, fault)}",
                remedy="run `kvoffload serve`, and set `server` to its socket",
            ) from fault
    return True


def _take_start_lock(files: PrivateFiles, until: float) -> FileLock:
    while True:
        try:
            lock = FileLock.take(files.start_lock, wait_s=until - time.monotonic())
        except FileNotFoundError:
            # The last server of the folder has just removed it.
            lock = None
            if time.monotonic() < until:
                files.make_folder()
                continue
        except OSError as fault:
            raise PrivateServerError(
                f"{files.start_lock} cannot be used: {fault.strerror}", remedy=f"remove the folder {files.folder}"
            ) from fault
        if lock is None:
            raise PrivateServerError(
                "the private server is being started or ended by another process, and that takes too long",
                remedy=f"look at {files.log}",
            )
        return lock


def _start(files: PrivateFiles, lock: FileLock, options: list[str], given: bytes, until: float) -> None:
    """Starts a server with the given settings, and waits until it listens."""
    told_end, tell_end = os.pipe()
    with open(told_end, "rb", 0) as told, open(tell_end, "wb", 0) as tell, _open_log(files.log) as log:
        begin = os.fstat(log.fileno()).st_size
        descriptors = (lock.fileno(), tell.fileno())
        command = [sys.executable, "-I", "-S", str(LAUNCHER), ",".join(map(str, sorted(engine_cpus())))]
        command += [sys.executable, "-P", "-m", "kvoffload", "serve", "--private", *map(str, descriptors), *options]
        try:
            subprocess.run(
                command,
                input=given,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=descriptors,
                process_group=0,
                timeout=max(until - time.monotonic(), 0),
                check=False,
            )
            tell.close()
            answer = _read(told, until)
        except subprocess.TimeoutExpired:
            answer = None
        except OSError as fault:
            _clear(files, lock)
            raise _refuse(f"{sys.executable} cannot be run: {fault.strerror}") from fault
        if answer is None:
            raise _refuse(f"it is not there in time; look at {files.log}")
        if not answer:
            reason = _read_reason(log, begin)
            _clear(files, lock)
            raise _refuse(reason)


def _open_log(path: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "r+b", 0)


def _read(told: IO[bytes], until: float) -> bytes | None:
    """Reads the server's byte; empty if the server has died; None if neither happens in time."""
    poller = select.poll()
    poller.register(told, select.POLLIN)
    is_told = poller.poll(max(until - time.monotonic(), 0) * 1000)
    return told.read(1) if is_told else None


def _read_reason(log: IO[bytes], begin: int) -> str:
    """Returns the last line that the server has written."""
    end = os.fstat(log.fileno()).st_size
    begin = max(begin, end - _REASON_BYTES)
    lines = os.pread(log.fileno(), _REASON_BYTES, begin).decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("kvoffload: ") if said else "it ended without a word"


def _clear(files: PrivateFiles, lock: FileLock) -> None:
    """Removes the files of a server that has died."""
    with contextlib.suppress(OSError):
        files.log.unlink()
    lock.remove()
    files.remove_folder()


def _refuse(reason: str) -> PrivateServerError:
    return PrivateServerError(
        f"the private server did not start: {reason}",
        remedy="without it nothing is cached; `kvoffload serve` with the same settings shows more",
    )
