"""Disk tiers in a folder of a test."""

from __future__ import annotations

from pathlib import Path

from kvoffload.tiers.disk import DiskFolder, DiskSettings, DiskTier
from tests.kit.tiers.tier_contract import TIMEOUT_S

SEGMENT_BYTES = 1 << 20


CAPACITY_BYTES = 32 << 20


def make_tier(*folders: Path, **changes: object) -> DiskTier:
    for folder in folders:
        folder.mkdir(mode=0o700, exist_ok=True)
    settings = DiskSettings(
        folders=[DiskFolder(path=folder, capacity_bytes=CAPACITY_BYTES) for folder in folders],
        segment_bytes=SEGMENT_BYTES,
        record_limit_bytes=512 << 10,
        probe_interval_s=0.01,
        **changes,  # type: ignore[arg-type]
    )
    tier = DiskTier(settings)
    assert tier.wait_open(TIMEOUT_S)
    return tier
