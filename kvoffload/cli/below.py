"""Which tiers lie below a server's memory, by its settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.valkey_terms import make_valkey
from kvoffload.config.mooncake_address import parse_mooncake_address
from kvoffload.config.s3_address import parse_s3_address
from kvoffload.config.sources import Settings, format_shown
from kvoffload.config.tier_kinds import TIER_KINDS
from kvoffload.config.types import split_folders
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_private_text
from kvoffload.s3_keys import S3Keys, parse_s3_keys
from kvoffload.server.config import ServerConfig
from kvoffload.server.tiering.terms import TierPlan, TierTerms, WriteRule
from kvoffload.tiers.disk import DiskFolder, DiskTerms
from kvoffload.tiers.mooncake import MooncakeTerms
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.s3 import S3Terms
from kvoffload.units import GIB, format_size

if TYPE_CHECKING:
    from kvoffload.cli.fleet import FleetPlan

MIN_DISK_BYTES = GIB
MOONCAKE_CLIENTS = 2
"""Each is a process."""


def choose_tiers(settings: Settings, config: ServerConfig, fleet: FleetPlan | None = None) -> dict[str, list[TierPlan]]:
    """Chooses tiers by domain, the nearest first. ConfigError: the settings do not fit each other, or the domains."""
    peers = None if fleet is None else fleet.tier
    plans = (_plan_disk(settings, fleet), peers, _plan_mooncake(settings), _plan_valkey(settings), _plan_s3(settings))
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


def _plan_disk(settings: Settings, fleet: FleetPlan | None) -> TierPlan | None:
    folders = [Path(folder) for folder in split_folders(settings.disk)]
    if not folders:
        return None
    if settings.disk_size < MIN_DISK_BYTES:
        raise ConfigError(
            f"setting 'disk_size' = {format_size(settings.disk_size)} with disk = {settings.disk!r}",
            remedy=f"allowed is a size of at least {format_size(MIN_DISK_BYTES)}",
        )
    disk = DiskTerms(
        folders=[DiskFolder(path=folder, capacity_bytes=settings.disk_size) for folder in folders],
        daily_bytes=settings.disk_daily,
        compress=Coding(settings.disk_compress),
    )
    # In a fleet a record is kept where it lives, and not on every disk.
    wants = None if fleet is None else fleet.place.is_home
    terms = TierTerms(write=WriteRule(settings.disk_write), queue_s=settings.disk_queue, wants=wants)
    return TierPlan(place=disk, terms=terms)


def _plan_valkey(settings: Settings) -> TierPlan | None:
    if not settings.valkey:
        return None
    terms = TierTerms(name="valkey", write=WriteRule(settings.remote_write), queue_s=settings.remote_queue)
    return TierPlan(place=make_valkey(settings, settings.valkey), terms=terms)


def _plan_s3(settings: Settings) -> TierPlan | None:
    if not settings.s3:
        return None
    s3 = S3Terms(
        address=parse_s3_address(settings.s3),
        endpoint=settings.s3_endpoint,
        region=settings.s3_region,
        keys=_read_s3_keys(settings.s3_credentials_file),
        ca_certificates=_read_certificates(settings.s3_ca_file),
        call_timeout_s=settings.remote_timeout,
        connections=settings.remote_connections,
        compress=Coding(settings.remote_compress),
    )
    terms = TierTerms(name="s3", write=WriteRule(settings.remote_write), queue_s=settings.remote_queue)
    return TierPlan(place=s3, terms=terms)


def _read_s3_keys(file: str) -> S3Keys | None:
    if not file:
        return None
    try:
        return parse_s3_keys(read_private_text(Path(file)))
    except ValueError as fault:
        raise ConfigError(
            f"setting 's3_credentials_file' = {file!r}: {fault}",
            remedy="give a file with a section [default], aws_access_key_id and aws_secret_access_key",
        ) from None


def _read_certificates(file: str) -> str:
    if not file:
        return ""
    try:
        text = Path(file).read_text("ascii", "replace")
    except OSError as fault:
        text = f"{fault.strerror}"
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ConfigError(
            f"setting 's3_ca_file' = {file!r} is no certificate that can be read",
            remedy="give a file of certificates in PEM",
        )
    return text


def _plan_mooncake(settings: Settings) -> TierPlan | None:
    if not settings.mooncake:
        return None
    mooncake = MooncakeTerms(
        address=parse_mooncake_address(settings.mooncake),
        protocol=settings.mooncake_protocol,
        device=settings.mooncake_device,
        metadata=settings.mooncake_metadata,
        host=settings.mooncake_host,
        call_timeout_s=settings.remote_timeout,
        connections=min(settings.remote_connections, MOONCAKE_CLIENTS),
        compress=Coding(settings.remote_compress),
    )
    terms = TierTerms(name="mooncake", write=WriteRule(settings.remote_write), queue_s=settings.remote_queue)
    return TierPlan(place=mooncake, terms=terms)
