"""`kvoffload serve`: one pool of memory for the engines of this machine."""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from kvoffload.cache import CacheTerms
from kvoffload.cli.config import ConfigOption, SetOption, parse_assignments
from kvoffload.client.private_files import PrivateFiles
from kvoffload.config import Settings, load_settings
from kvoffload.errors import CacheMemoryError, ConfigError
from kvoffload.file_lock import FileLock
from kvoffload.native import memory_headroom_bytes
from kvoffload.units import GIB, MIB, format_size

AUTO_LIMIT_BYTES = 16 * GIB
ADOPT_WAIT_S = 3.0
"""How long engines that hold a dead server's memory have to offer it."""
FIRST_ENGINE_S = 60.0
"""How long a private server waits for its first engine; who started it may have died."""
PREDECESSOR_WAIT_S = 30.0
"""How long a private server waits for one of the same name that is ending."""


def serve(
    file: ConfigOption = None,
    assignments: SetOption = None,
    *,
    adopt_wait: Annotated[
        float, typer.Option("--adopt-wait", help="Seconds to wait for an old server's memory.", min=0)
    ] = ADOPT_WAIT_S,
    private: Annotated[tuple[int, int] | None, typer.Option("--private", metavar="LOCK READY", hidden=True)] = None,
    first_engine_within: Annotated[float, typer.Option("--first-engine-within", hidden=True, min=0)] = FIRST_ENGINE_S,
) -> None:
    """Serve cached blocks to this machine's engines until SIGTERM, and then until nobody holds any."""
    # Who starts a private server gives it two descriptors: one that has the start lock, and one that is written to.
    settings = load_settings(file=file, flags=parse_assignments(assignments or [])).settings
    if not settings.server:
        raise ConfigError("no socket to serve on", remedy="say `kvoffload serve --set server=/run/kvoffload.sock`")
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from kvoffload.daemon.ending import EndingTerms
    from kvoffload.daemon.private_life import PrivateTerms
    from kvoffload.daemon.server import CacheServer, ServerPlan

    memory_bytes = choose_memory_bytes(settings)
    if private is not None and not adopt_wait:
        check_memory(memory_bytes)
    ending = EndingTerms(linger_s=settings.linger, first_engine_s=first_engine_within)
    files = PrivateFiles(Path(settings.server))
    plan = ServerPlan(
        socket=files.socket,
        memory={"": make_terms(settings, memory_bytes)},
        mode=int(settings.socket_mode, 8),
        group=find_group(settings.socket_group),
        adopt_wait_s=adopt_wait,
        listen_wait_s=0 if private is None else PREDECESSOR_WAIT_S,
        private=None if private is None else PrivateTerms(files=files, ending=ending),
    )
    server = CacheServer(plan)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        typer.echo(f"kvoffload serves {format_size(memory_bytes)} on {settings.server}, process {os.getpid()}")
        if private is not None:
            tell_starter(FileLock(files.start_lock, private[0]), private[1])
        server.run()
    finally:
        server.close()


def tell_starter(lock: FileLock, ready: int) -> None:
    """The server listens. Others may look for it, whether its starter still lives or not."""
    lock.close()
    with contextlib.suppress(BrokenPipeError):
        os.write(ready, b"1")
    os.close(ready)


def find_group(group: str) -> int | None:
    """The number of a group by its name or number. ConfigError: there is none of that name."""
    if not group:
        return None
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as fault:
        raise ConfigError(
            f"setting 'socket_group' = {group!r}: there is no such group here", remedy="name one, or give its number"
        ) from fault


def choose_memory_bytes(settings: Settings) -> int:
    """What is asked for in whole segments; `auto` is half of what is free, at most 16 GiB."""
    memory = settings.memory
    wanted = memory if isinstance(memory, int) else min(memory_headroom_bytes() // 2, AUTO_LIMIT_BYTES)
    segment_bytes = min(settings.segment_size, max(wanted, 64 * MIB))
    return max(wanted // segment_bytes, 1) * segment_bytes


def check_memory(memory_bytes: int) -> None:
    """CacheMemoryError: there is not so much. The pool itself looks more closely, when nobody waits for it any more."""
    free_bytes = memory_headroom_bytes()
    if memory_bytes > free_bytes:
        raise CacheMemoryError(
            f"{format_size(memory_bytes)} of memory are wanted, {free_bytes >> 20}MiB are free",
            remedy="set `memory` to less, or to auto",
        )


def make_terms(settings: Settings, memory_bytes: int) -> CacheTerms:
    """The pool of these settings."""
    segment_bytes = min(settings.segment_size, memory_bytes)
    return CacheTerms(memory_bytes=memory_bytes, segment_bytes=segment_bytes, verify=settings.verify)
