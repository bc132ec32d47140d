"""`kvoffload doctor`: what of this machine and these settings would stop kvoffload, or slow it down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from kvoffload.cli.config import ConfigOption, SetOption, parse_assignments
from kvoffload.config.sources import Settings, Source, load_settings, load_shared
from kvoffload.doctor.findings import Finding, Verdict, fail
from kvoffload.doctor.given import Given
from kvoffload.errors import ConfigError

_COLORS = {Verdict.OK: typer.colors.GREEN, Verdict.WARN: typer.colors.YELLOW, Verdict.FAIL: typer.colors.RED}
_NAME_WIDTH = 14
FAILED = 1


def doctor(
    file: ConfigOption = None,
    assignments: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    *,
    sglang: Annotated[
        str, typer.Option("--sglang", help="A command that starts SGLang, in quotes; it is checked, too.")
    ] = "",
    allowed_plugins: Annotated[str | None, typer.Option("--vllm-plugins", envvar="VLLM_PLUGINS", hidden=True)] = None,
    allocator: Annotated[str, typer.Option("--cuda-allocator", envvar="PYTORCH_CUDA_ALLOC_CONF", hidden=True)] = "",
) -> None:
    """Check this machine for what the settings ask of it, with a remedy for each finding; 1 if something fails."""
    settings = _load(file, parse_assignments(assignments or []))
    has_failed = False
    given = Given(file, tuple(assignments or ()), bool(settings.server))
    for finding in chain(examine(settings, given, allowed_plugins, allocator), examine_launch(sglang)):
        has_failed |= finding.verdict is Verdict.FAIL
        print_finding(finding, as_json)
    if has_failed:
        raise typer.Exit(FAILED)


def _load(file: Path | None, flags: dict[str, object]) -> Settings:
    """Reads the settings; `server` is the socket of a shared server, if one is said or there is one where commands
    look."""
    loaded = load_settings(file=file, flags=flags)
    if loaded.sources["server"] is not Source.DEFAULT:
        return loaded.settings
    try:
        shared = load_shared(file, flags).settings
    except ConfigError:  # auto is nowhere
        return loaded.settings
    return shared if Path(shared.server).exists() else loaded.settings


def examine(settings: Settings, given: Given, allowed_plugins: str | None, allocator: str = "") -> Iterator[Finding]:
    """Prints each finding as soon as it is known."""
    from kvoffload.cli.below import choose_tiers
    from kvoffload.cli.serve import choose_memory, read_tables
    from kvoffload.config.types import split_folders
    from kvoffload.doctor.disk_checks import check_disks
    from kvoffload.doctor.engine_checks import check_engine
    from kvoffload.doctor.limit_checks import Wanted, check_limits
    from kvoffload.doctor.link_checks import check_keys, look_at_sealing
    from kvoffload.doctor.machine import look_at_machine
    from kvoffload.doctor.machine_checks import check_machine
    from kvoffload.doctor.place_checks import check_server, check_shapes, check_stores

    machine = look_at_machine()
    yield from check_machine(machine)
    yield from check_engine(machine, allowed_plugins, allocator)
    try:
        config = read_tables(given.file)
        memory = choose_memory(settings, config).values()
        plans = [plan for below in choose_tiers(settings, config).values() for plan in below]
    except ConfigError as fault:
        yield fail("settings", fault.message, fault.remedy or "kvoffload config show")
        return
    wanted = Wanted(
        memory_bytes=sum(pool.memory_bytes for pool in memory),
        segment_bytes=max(pool.segment_bytes for pool in memory),
    )
    yield from check_limits(machine, wanted, given)
    yield from check_disks([Path(folder) for folder in split_folders(settings.disk)], settings.disk_size, given)
    yield from check_keys(settings.key_file, {"listen": settings.listen, "peer_listen": settings.peer_listen})
    yield check_server(settings.server, given)
    yield from check_shapes(settings.server)
    if settings.peer_listen and settings.peer_link == "sealed":
        yield look_at_sealing(machine)
    yield from check_stores(plans, settings.remote_timeout)


def examine_launch(line: str) -> Iterator[Finding]:
    """Checks a command that starts SGLang; an empty one is none."""
    from kvoffload.doctor.launch_checks import check_launch
    from kvoffload.doctor.machine import look_at_machine

    if line:
        yield from check_launch(line, look_at_machine())


def print_finding(finding: Finding, as_json: bool) -> None:
    """Prints a finding, in colors where there is a terminal."""
    if as_json:
        row = {
            "check": finding.check,
            "verdict": finding.verdict.value,
            "text": finding.text,
            "remedy": finding.remedy,
        }
        typer.echo(json.dumps(row))
        return
    verdict = typer.style(f"{finding.verdict.value:<4}", fg=_COLORS[finding.verdict])
    typer.echo(f"{verdict}  {finding.check:<{_NAME_WIDTH}}  {finding.text}")
    if finding.remedy:
        typer.echo(f"      {'':<{_NAME_WIDTH}}  {finding.remedy}")
