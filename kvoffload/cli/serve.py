"""`kvoffload serve`: one pool of memory for the engines of this machine."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from kvoffload.cache import CacheTerms
from kvoffload.cli.config import ConfigOption, SetOption, parse_assignments
from kvoffload.config import Settings, load_settings
from kvoffload.errors import ConfigError
from kvoffload.native import memory_headroom_bytes
from kvoffload.units import GIB, MIB, format_size

AUTO_LIMIT_BYTES = 16 * GIB
ADOPT_WAIT_S = 3.0
"""How long engines that hold a dead server's memory have to offer it."""


def serve(
    file: ConfigOption = None,
    assignments: SetOption = None,
    *,
    adopt_wait: Annotated[
        float, typer.Option("--adopt-wait", help="Seconds to wait for an old server's memory.", min=0)
    ] = ADOPT_WAIT_S,
) -> None:
    """Serve cached blocks to this machine's engines until SIGTERM, and then until nobody holds any."""
    settings = load_settings(file=file, flags=parse_assignments(assignments or [])).settings
    if not settings.server:
        raise ConfigError("no socket to serve on", remedy="say `kvoffload serve --set server=/run/kvoffload.sock`")
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from kvoffload.daemon.server import CacheServer, ServerPlan

    memory_bytes = choose_memory_bytes(settings)
    plan = ServerPlan(
        socket=Path(settings.server), memory={"": make_terms(settings, memory_bytes)}, adopt_wait_s=adopt_wait
    )
    server = CacheServer(plan)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        typer.echo(f"kvoffload serves {format_size(memory_bytes)} on {settings.server}, process {os.getpid()}")
        server.run()
    finally:
        server.close()


def choose_memory_bytes(settings: Settings) -> int:
    """What is asked for in whole segments; `auto` is half of what is free, at most 16 GiB."""
    memory = settings.memory
    wanted = memory if isinstance(memory, int) else min(memory_headroom_bytes() // 2, AUTO_LIMIT_BYTES)
    segment_bytes = min(settings.segment_size, max(wanted, 64 * MIB))
    return max(wanted // segment_bytes, 1) * segment_bytes


def make_terms(settings: Settings, memory_bytes: int) -> CacheTerms:
    """The pool of these settings."""
    segment_bytes = min(settings.segment_size, memory_bytes)
    return CacheTerms(memory_bytes=memory_bytes, segment_bytes=segment_bytes, verify=settings.verify)
