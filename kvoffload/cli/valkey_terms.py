"""How a Valkey is reached, the tier's and the registry's of a fleet, by the files that the settings name."""

from __future__ import annotations

from pathlib import Path

from kvoffload.config.sources import Settings
from kvoffload.config.valkey_address import parse_valkey_address
from kvoffload.key_files import read_private_text
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.valkey import ValkeyTerms


def make_valkey(settings: Settings, address: str) -> ValkeyTerms:
    """Makes the terms. ConfigError: a file cannot be read."""
    password = read_private_text(Path(settings.valkey_password_file)) if settings.valkey_password_file else ""
    return ValkeyTerms(
        address=parse_valkey_address(address),
        password=password.strip(),
        ca_file=settings.valkey_ca_file,
        cert_file=settings.valkey_cert_file,
        key_file=settings.valkey_key_file,
        call_timeout_s=settings.remote_timeout,
        connections=settings.remote_connections,
        ttl_s=round(settings.valkey_ttl),
        compress=Coding(settings.remote_compress),
    )
