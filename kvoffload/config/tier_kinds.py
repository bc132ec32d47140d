"""The kinds of tiers that are slower than memory. Whatever needs to know which tiers there are reads this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class TierKind:
    """One kind of tier."""

    name: str
    """Name of the tier in metrics, log lines and the findings of `kvoffload doctor`."""
    setting: str
    """The setting that says where the tier's records are. If it is empty, a server has no tier of this kind."""
    is_remote: bool = False
    """Whether the tier is a store that other machines use too."""
    place: str = ""
    """The class of a remote tier's place, a RemotePlace, as `module:class`. Empty if the setting names the class."""


TIER_KINDS: Final = (
    TierKind(name="disk", setting="disk"),
    TierKind(name="peer", setting="peer_listen"),
    TierKind(name="mooncake", setting="mooncake", is_remote=True, place="kvoffload.tiers.mooncake:MooncakeSettings"),
    TierKind(name="valkey", setting="valkey", is_remote=True, place="kvoffload.tiers.valkey:ValkeySettings"),
    TierKind(name="custom", setting="custom_tier", is_remote=True),
    TierKind(name="s3", setting="s3", is_remote=True, place="kvoffload.tiers.s3:S3Settings"),
)
"""All kinds, in the order in which a server asks its tiers for a record."""


def list_tier_names() -> str:
    """Lists the names of all kinds for a sentence, such as "disk, peer or s3"."""
    *others, last = (kind.name for kind in TIER_KINDS)
    return f"{', '.join(others)} or {last}"
