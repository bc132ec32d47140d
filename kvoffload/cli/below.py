"""Which tiers lie below a server's memory, by its settings."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.config.sources import Settings, format_shown
from kvoffload.config.tier_kinds import TIER_KINDS, TierKind
from kvoffload.config.types import split_folders
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_seal_keys
from kvoffload.native import SealKeys
from kvoffload.server.config import ServerConfig
from kvoffload.server.tiering.settings import TierPlan, TierSettings, WriteRule
from kvoffload.tiers.disk import DiskFolder, DiskSettings
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.record_store import one_line
from kvoffload.tiers.remote import RemotePlace
from kvoffload.units import GIB, format_size

if TYPE_CHECKING:
    from kvoffload.cli.fleet import FleetPlan

MIN_DISK_BYTES = GIB


def choose_tiers(settings: Settings, config: ServerConfig, fleet: FleetPlan | None = None) -> dict[str, list[TierPlan]]:
    """Chooses tiers by domain, the nearest first. ConfigError: the settings do not fit each other, or the domains."""
    keys = _read_seal_keys(settings.seal_key_file)
    own = {"disk": _plan_disk(settings, fleet, keys), "peer": None if fleet is None else fleet.tier}
    plans = [_plan_store(kind, settings, keys) if kind.is_remote else own[kind.name] for kind in TIER_KINDS]
    tiers = [plan for plan in plans if plan is not None]
    if not tiers:
        return {}
    if len(config.domains) > 1:
        name = next(kind.setting for kind in TIER_KINDS if getattr(settings, kind.setting))
        shown = format_shown(name, getattr(settings, name))
        raise ConfigError(
            f"setting {name!r} = {shown!r} with {len(config.domains)} domains: blocks of one domain "
            "could come to another's memory",
            remedy=f"leave {name} empty, or serve each domain by a server of its own",
        )
    return {config.make_domains()[0].name: tiers}


def _read_seal_keys(file: str) -> SealKeys | None:
    if not file:
        return None
    keys = read_seal_keys(Path(file))
    try:
        return SealKeys(keys)
    except RuntimeError as fault:
        raise ConfigError(
            f"setting 'seal_key_file' = {file!r}: records cannot be sealed: {fault}",
            remedy="install Debian's libssl3, or leave it empty",
        ) from fault


def _plan_disk(settings: Settings, fleet: FleetPlan | None, keys: SealKeys | None) -> TierPlan | None:
    folders = [Path(folder) for folder in split_folders(settings.disk)]
    if not folders:
        return None
    if settings.disk_size < MIN_DISK_BYTES:
        raise ConfigError(
            f"setting 'disk_size' = {format_size(settings.disk_size)} with disk = {settings.disk!r}",
            remedy=f"allowed is a size of at least {format_size(MIN_DISK_BYTES)}",
        )
    disk = DiskSettings(
        folders=[DiskFolder(path=folder, capacity_bytes=settings.disk_size) for folder in folders],
        daily_bytes=settings.disk_daily,
        compress=Coding(settings.disk_compress),
        seal_keys=keys,
    )
    # In a fleet a record is kept where it lives, and not on every disk.
    wants = None if fleet is None else fleet.place.is_home
    tier_settings = TierSettings(write=WriteRule(settings.disk_write), queue_s=settings.disk_queue, wants=wants)
    return TierPlan(place=disk, settings=tier_settings)


def _plan_store(kind: TierKind, settings: Settings, keys: SealKeys | None) -> TierPlan | None:
    where = getattr(settings, kind.setting)
    if not where:
        return None
    tier_settings = TierSettings(
        name=kind.name,
        write=WriteRule(settings.remote_write),
        queue_s=settings.remote_queue,
        look_timeout_s=settings.remote_timeout,
        seal_keys=keys,
    )
    if kind.place:
        place = _load_place(kind.place).from_settings(settings, where)
    else:
        place = _make_custom_place(settings)
    return TierPlan(place=place, settings=tier_settings)


def _make_custom_place(settings: Settings) -> RemotePlace:
    kind, where = _load_place(settings.custom_tier), settings.custom_tier_place
    try:
        return kind.from_settings(settings, where)
    except ValueError as fault:
        raise ConfigError(
            f"setting 'custom_tier_place' = {where!r}: {one_line(str(fault))}",
            remedy=f"allowed is what {settings.custom_tier} takes",
        ) from fault


def _load_place(path: str) -> type[RemotePlace]:
    """Imports a class of the table or of the setting `custom_tier`. Tiers that a server does not have are never
    imported."""
    path_of_module, _, name = path.partition(":")
    wrong = f"setting 'custom_tier' = {path!r}"
    try:
        module = import_module(path_of_module)
    except Exception as fault:  # a module that is not ours may raise anything
        told = f"{type(fault).__name__}: {one_line(str(fault))}"
        raise ConfigError(
            f"{wrong}: the module cannot be imported: {told}",
            remedy="install it where the server runs, or add its folder to PYTHONPATH",
        ) from fault
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{wrong}: the module has no {name}", remedy="allowed is module.path:Class")
    if not (isinstance(found, type) and issubclass(found, RemotePlace)):
        raise ConfigError(
            f"{wrong}: {name} is not a tier", remedy="make it a subclass of kvoffload.tiers.remote.RemotePlace"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{wrong}: {name} has no {', '.join(missing)}", remedy="add what docs/remote.md lists")
    return found
