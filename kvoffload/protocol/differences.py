"""Compares two identities: the parts in which they differ, and whether that is only a setting of the engines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from kvoffload.protocol.opening import GroupTerms, IdentityField, find_model

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SETTINGS = frozenset(
    {
        "hash_block_tokens",
        "hash_algorithm",
        "hash_seed",
        "salt",
        "kv_dtype",
        "model_dtype",
        "layout",
        "parallel_shape",
    }
)
"""Differences that an operator can remove by starting both engines with the same settings."""
_EXPLAINED_BY = {
    "geometry": frozenset({"hash_block_tokens", "kv_dtype", "model_dtype", "layout", "parallel_shape"}),
    "layers": frozenset({"kv_dtype", "model_dtype"}),
    "parallel": frozenset({"parallel_shape"}),
    "ranks": frozenset({"parallel_shape"}),
    "weights": frozenset({"model_dtype", "parallel_shape"}),
}
"""Parts that are known as a digest, or by less, and the readable parts that say the same in words."""


class TellsIdentity(Protocol):
    """A message that describes an identity: a registration, or what an operator reads of one."""

    @property
    def hash_algorithm(self) -> str: ...
    @property
    def hash_block_size(self) -> int: ...
    @property
    def hash_seed(self) -> bytes: ...
    @property
    def ranks(self) -> int: ...
    @property
    def groups(self) -> tuple[GroupTerms, ...]: ...
    @property
    def identity(self) -> tuple[IdentityField, ...]: ...


@dataclass(frozen=True)
class ToldDifference:
    """One part in which two identities differ."""

    name: str
    ours: str
    """The value as text; a digest if the part is long or secret."""
    theirs: str

    @property
    def is_readable(self) -> bool:
        """Whether both values are words or numbers, and not digests."""
        return not (_DIGEST.fullmatch(self.ours) or _DIGEST.fullmatch(self.theirs))


def tell_differences(ours: TellsIdentity, theirs: TellsIdentity) -> tuple[ToldDifference, ...]:
    """Returns the parts in which two identities differ, as far as both were told, in the order of their names. Parts
    that readable ones explain are left out."""
    parts, other_parts = _list_parts(ours), _list_parts(theirs)
    differing = {name for name in parts.keys() & other_parts.keys() if parts[name] != other_parts[name]}
    shown = sorted(name for name in differing if not differing & _EXPLAINED_BY.get(name, frozenset()))
    if not shown and ours.groups != theirs.groups:
        return (ToldDifference("groups", _draw_groups(ours), _draw_groups(theirs)),)
    return tuple(ToldDifference(name, parts[name], other_parts[name]) for name in shown)


def differ_by_setting(ours: TellsIdentity, theirs: TellsIdentity) -> bool:
    """Whether engines of one kind have loaded the same weights, and share no blocks because a setting differs. Engines
    of different kinds, and ranks that only have other parts of the model, do not count."""
    parts, other_parts = _list_parts(ours), _list_parts(theirs)
    if not parts.get("revision") or parts["revision"] != other_parts.get("revision"):
        return False
    if _kind(parts) != _kind(other_parts):
        return False
    differing = {one.name for one in tell_differences(ours, theirs)}
    return bool(differing & _SETTINGS) and "weights" not in differing


def describe_pair(ours: TellsIdentity, theirs: TellsIdentity) -> str:
    """Describes a pair of engines in a line, as in "Qwen3: hash_block_tokens 64 and 128"."""
    told = (
        f"{one.name} {one.ours} and {one.theirs}" if one.is_readable else one.name
        for one in tell_differences(ours, theirs)
    )
    return f"{find_model(ours.identity) or 'a model without a name'}: {', '.join(told)}"


def _list_parts(told: TellsIdentity) -> dict[str, str]:
    """Returns all parts by name, with those that a message has in fields of its own."""
    own = {"hash_algorithm": told.hash_algorithm, "hash_block_tokens": str(told.hash_block_size or "")}
    own |= {"hash_seed": told.hash_seed.hex(), "ranks": str(told.ranks or "")}
    return {**own, **{part.name: part.value for part in told.identity}}


def _kind(parts: dict[str, str]) -> list[str]:
    """Returns the words of the engine's name without its version."""
    name, *rest = parts.get("engine", "").split(" ")
    return [name, *rest[1:]]


def _draw_groups(told: TellsIdentity) -> str:
    return ", ".join(f"{group.record_bytes} bytes a block of {group.block_size} tokens" for group in told.groups)
