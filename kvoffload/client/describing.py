"""What an engine says of its blocks when it registers."""

from __future__ import annotations

from dataclasses import replace

from kvoffload.cache import CacheGeometry
from kvoffload.protocol import GroupTerms, IdentityField, Register, Reuse
from kvoffload.protocol.limits import MAX_REPORT
from kvoffload.types import Fingerprint


def describe_blocks(
    fingerprint: Fingerprint,
    geometry: CacheGeometry,
    *,
    hash_algorithm: str,
    hash_seed: bytes = b"",
    rank: int = 0,
    ranks: int = 1,
    tenant: str = "",
    identity: tuple[IdentityField, ...] = (),
) -> Register:
    """`hash_seed` is the digest of one, never the seed."""
    groups = tuple(
        GroupTerms(
            record_bytes=group.record_bytes,
            block_size=group.rule.block_size,
            reuse=Reuse[group.rule.reuse.name],
            window=group.rule.window,
            shards=group.shards,
        )
        for group in geometry.groups
    )
    return Register(
        fingerprint=fingerprint,
        hash_algorithm=hash_algorithm,
        hash_seed=hash_seed,
        hash_block_size=geometry.hash_block_size,
        groups=groups,
        rank=rank,
        ranks=ranks,
        tenant=tenant,
        identity=identity,
    )


def add_report_text(register: Register, report: str) -> Register:
    """With what this process registered, for operators to read; as many of its lines as fit."""
    text = report.encode()
    if len(text) > MAX_REPORT:
        text = text[: text.rfind(b"\n", 0, MAX_REPORT) + 1]
    return replace(register, report=text)
