"""`kvoffload serve`: one pool of memory for the engines of this machine."""

from __future__ import annotations

import contextlib
import grp
import json
import logging
import os
import signal
import sys
from collections import ChainMap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvoffload.cache import CacheSettings, HugePages, refuse_memory
from kvoffload.cli.config import ConfigOption, SetOption, parse_assignments
from kvoffload.config.secrets import mask_secrets
from kvoffload.config.sources import (
    SERVER_TABLES,
    Settings,
    find_service_manager,
    load_settings,
    load_shared,
    read_toml,
)
from kvoffload.config.tcp_address import parse_tcp_address
from kvoffload.config.tier_kinds import TIER_KINDS
from kvoffload.config.types import split_folders
from kvoffload.cpus import count_cpus
from kvoffload.errors import ConfigError
from kvoffload.file_lock import FileLock
from kvoffload.key_files import read_pair_for
from kvoffload.native import memory_headroom_bytes, memory_total_bytes
from kvoffload.server import Guest, TcpSettings
from kvoffload.server.config import ServerConfig, read_server_config
from kvoffload.units import GIB, MIB, format_size

if TYPE_CHECKING:
    from kvoffload.cli.fleet import FleetPlan
    from kvoffload.server.tiering.settings import TierPlan

AUTO_LEAST_BYTES = GIB
MOST_GROWING_THREADS = 8
"""Each takes about 2 GiB a second. More of them would be in the way of the engines that load meanwhile."""
AUTO_ENGINE_SHARE = 4
"""`auto` is at most so many times what the engines cache themselves, where that is known."""
FIRST_ENGINE_S = 60.0
"""Seconds that a private server waits for its first engine, because the engine that started it may have died."""
PREDECESSOR_WAIT_S = 30.0
"""Seconds that a private server waits for one of the same name that is ending."""


def serve(
    file: ConfigOption = None,
    assignments: SetOption = None,
    *,
    adopt_wait: Annotated[
        float | None,
        typer.Option(
            "--adopt-wait",
            help="Seconds to wait for an old server's memory. 3 where one has left a record on the socket, else 0.",
            min=0,
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write which blocks prompts ask for to a new file: hashes, for `replay`."),
    ] = None,
    private: Annotated[tuple[int, int] | None, typer.Option("--private", metavar="LOCK READY", hidden=True)] = None,
    engine_cache: Annotated[int, typer.Option("--engine-cache", hidden=True, min=0)] = 0,
    first_engine_within: Annotated[float, typer.Option("--first-engine-within", hidden=True, min=0)] = FIRST_ENGINE_S,
) -> None:
    """Serve cached blocks to this machine's engines until SIGTERM, and then until no engine holds any."""
    # An engine that starts a private server passes it two descriptors: the start lock, and one to write to when it
    # listens. The settings that the engine writes to its standard input count, whatever the environment says.
    flags = parse_assignments(assignments or [])
    if private is None:
        loaded = load_shared(file, flags)
    else:
        loaded = load_settings(environment={}, flags=flags | json.load(sys.stdin))
    settings = loaded.settings
    from kvoffload.cli.serve_start import StandardError, StartTeller

    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[StandardError()],
    )
    from kvoffload.cli.prompt_recorder import PromptRecorder
    from kvoffload.private_files import PrivateFiles
    from kvoffload.server.channels.open_files import raise_limit
    from kvoffload.server.loop import CacheServer, ServerPlan
    from kvoffload.server.private_life import EndingSettings, PrivateSettings

    config = read_tables(file)
    fleet, tiers = plan_below(settings, config)
    memory = choose_memory(settings, config, engine_bytes=engine_cache)
    memory_bytes = sum(pool.memory_bytes for pool in memory.values())
    if not settings.sparse_memory:
        check_memory(memory_bytes)
    ending = EndingSettings(linger_s=settings.linger, first_engine_s=first_engine_within)
    files = PrivateFiles(Path(settings.server))
    recorder = None if record is None else PromptRecorder(record)
    plan = ServerPlan(
        socket=files.socket,
        memory=memory,
        domains=config.make_domains(),
        mode=int(settings.socket_mode, 8),
        group=find_group(settings.socket_group),
        adopt_wait_s=adopt_wait,
        listen_wait_s=0 if private is None else PREDECESSOR_WAIT_S,
        private=None if private is None else PrivateSettings(files=files, ending=ending),
        operator_uids=frozenset({os.getuid(), *(config.operators.users or ())}),
        operator_token=config.read_token(Path() if file is None else file.parent),
        remote=choose_remote(settings, config, None if fleet is None else fleet.guests),
        tiers=tiers,
        hand_over_s=settings.hand_over,
        peering=None if fleet is None else fleet.peering,
        on_prompt=None if recorder is None else recorder.note,
    )
    raise_limit()
    try:
        server = CacheServer(plan)
    except OSError as fault:
        remedy = "raise the limit of open files (ulimit -n), or give the machine more memory"
        raise ConfigError(f"the server cannot start: {fault.strerror or fault}", remedy=remedy) from fault
    teller = StartTeller(server, memory_bytes=memory_bytes, notify=find_service_manager())
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        where = " and ".join(filter(None, (settings.server, server.remote_endpoint)))
        places = [tier.place.describe() for below in plan.tiers.values() for tier in below]
        below = f", {' and '.join(places)} behind it" if places else ""
        typer.echo(f"kvoffload serves {format_size(memory_bytes)} on {where}, process {os.getpid()}{below}")
        for folder in filter(lambda one: not Path(one).is_dir(), split_folders(settings.disk)):
            typer.echo(f"there is no folder {folder} yet: nothing is on that disk until you make it, or correct `disk`")
        if private is not None:
            tell_starter(FileLock(files.start_lock, private[0]), private[1])
        server.run(teller.look)
    finally:
        teller.close()
        server.close()
        if recorder is not None:
            recorder.close()


def plan_below(settings: Settings, config: ServerConfig) -> tuple[FleetPlan | None, dict[str, list[TierPlan]]]:
    """Plans the fleet that the server is of, and by domain the tiers slower than its memory. Most have neither, and
    start sooner as they import nothing that only these need."""
    has_tier = any(getattr(settings, kind.setting) for kind in TIER_KINDS)
    if not (has_tier or config.peers or settings.fleet_registry):
        return None, {}
    if settings.s3 and find_spec("obstore") is None:
        raise ConfigError("setting 's3' needs obstore, which is not installed", remedy="pip install obstore")
    from kvoffload.cli.below import choose_tiers
    from kvoffload.cli.fleet import plan_fleet

    fleet = plan_fleet(settings, config)
    return fleet, choose_tiers(settings, config, fleet)


def read_tables(file: Path | None) -> ServerConfig:
    """Reads the tables of a configuration file that are not settings."""
    if file is None:
        return ServerConfig()
    tables = {name: value for name, value in read_toml(file).items() if name in SERVER_TABLES}
    return read_server_config(tables, origin=f"file {file}")


def choose_memory(settings: Settings, config: ServerConfig, *, engine_bytes: int = 0) -> dict[str, CacheSettings]:
    """Chooses memory by domain: its own in whole segments, or without domains that of the settings."""
    if not config.domains:
        return {"": make_settings(settings, choose_memory_bytes(settings, engine_bytes=engine_bytes))}
    chosen = {}
    for domain in config.domains:
        own = settings.model_copy(update={"memory": domain.memory})
        chosen[domain.name] = make_settings(own, choose_memory_bytes(own))
    return chosen


def choose_remote(
    settings: Settings, config: ServerConfig, announced: dict[str, Guest] | None = None
) -> TcpSettings | None:
    """Returns who is admitted over TCP, or None if the server does not listen there. Guests in `announced` may come and
    go. ConfigError: the server has no keys, or no client could connect."""
    if not settings.listen:
        return None
    address = parse_tcp_address(settings.listen)
    keys = read_pair_for(settings.key_file, setting="listen", address=settings.listen)
    if not config.clients and not config.peers and not settings.fleet_registry:
        remedy = "name clients with their keys in [[clients]], or servers in [[peers]]"
        raise ConfigError(f"no client may connect to {address}", remedy=remedy)
    return TcpSettings(
        address=address, keys=keys, guests=ChainMap(config.make_guests(), {} if announced is None else announced)
    )


def tell_starter(lock: FileLock, ready: int) -> None:
    """Frees the start lock and lets the engine that started the server know that it listens. Other engines may look for
    the server from then on, whether that engine still lives or not."""
    lock.close()
    with contextlib.suppress(BrokenPipeError):
        os.write(ready, b"1")
    os.close(ready)


def find_group(group: str) -> int | None:
    """Finds the number of a group by its name or number. ConfigError: there is none of that name."""
    if not group:
        return None
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"setting 'socket_group' = {mask_secrets(group)!r}: there is no such group here",
            remedy="name one, or give its number",
        ) from None


def choose_memory_bytes(settings: Settings, *, engine_bytes: int = 0) -> int:
    """Rounds what is asked for to whole segments. `auto` is half of what this process could take now, the machine's and
    its cgroup's; at most four times what the engines cache themselves, where that is known; at least 1 GiB."""
    if isinstance(settings.memory, int):
        wanted = settings.memory
    else:
        half = memory_headroom_bytes() // 2
        wanted = max(min(half, AUTO_ENGINE_SHARE * engine_bytes) if engine_bytes else half, AUTO_LEAST_BYTES)
    segment_bytes = min(settings.segment_size, max(wanted, 64 * MIB))
    return max(wanted // segment_bytes, 1) * segment_bytes


def check_memory(memory_bytes: int) -> None:
    """Raises CacheMemoryError where the machine, or our cgroup, will never have so much. Memory that other
    processes use now counts as free, because they may give it back."""
    refuse_memory(memory_bytes, memory_total_bytes())


def make_settings(settings: Settings, memory_bytes: int) -> CacheSettings:
    """Makes the settings of a pool from what the user has set."""
    segment_bytes = min(settings.segment_size, memory_bytes)
    return CacheSettings(
        memory_bytes=memory_bytes,
        segment_bytes=segment_bytes,
        floor_bytes=memory_bytes * settings.memory_floor // 100,
        verify=settings.verify,
        # Where little is touched, a huge page is mostly waste.
        huge_pages=HugePages.NONE if settings.sparse_memory else HugePages.TRANSPARENT,
        is_sparse=settings.sparse_memory,
        threads=min(count_cpus(), MOST_GROWING_THREADS),
    )
