"""The settings with which a rank's linker uses the cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.sglang.held_pages import PoolSettings

FULL = 0
"""The group whose pages all are needed, of whatever model."""


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """The sizes and groups of one rank's pages, and how they are checked."""

    page_size: int
    groups: tuple[PoolSettings, ...]
    """The group of all pages comes first."""
    fingerprint: bytes
    """Fingerprint of the rank's identity; digests are made with it."""
    ranks: int = 1
    """Number of ranks of the engine. An engine with one rank may answer that a load failed, and then computes the
    request."""
    rank: int = 0
    """This rank's number. All ranks of an engine get the same prompts, so rank 0 alone counts them."""
    verify_always: bool = False

    @property
    def shards(self) -> tuple[int, ...]:
        """Returns the shards whose digests are wanted with a lease."""
        return (0,) if self.verify_always else ()
