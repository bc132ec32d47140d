"""The decoder and index of llm-d's router for vLLM's events, rewritten after its source.

The source: github.com/llm-d/llm-d-router, pkg/kvevents/engineadapter/vllm_msgpack.go and common.go (a batch is an array
of a time, events and a rank; an event is a map with its tag under `type`, or as vLLM wrote it until June 2026, an array
that begins with the tag) and pkg/kvevents/pool.go (what is done to the index). What is refused there is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgpack

Tokens: TypeAlias = tuple[int, ...]
RequestKey: TypeAlias = tuple[Any, ...]


class Refused(Exception):  # noqa: N818 (its word)
    """Nothing of the whole message is taken."""


class Stored(NamedTuple):
    block_hashes: list[int]
    tokens: list[int]
    block_size: int
    parent_block_hash: int = 0
    """0: none, or none is known."""
    medium: str = ""
    lora_name: str = ""
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str = ""
    kv_cache_spec_sliding_window: int | None = None


class Removed(NamedTuple):
    block_hashes: list[int]
    medium: str = ""
    group_idx: int | None = None


class AllCleared(NamedTuple):
    pass


Event: TypeAlias = Stored | Removed | AllCleared


class Message(NamedTuple):
    pod: str
    model: str
    number: int
    events: list[Event]


def read_message(frames: Sequence[bytes]) -> Message:
    """Reads what a subscriber has received: a topic, a number and a batch. Refused."""
    if len(frames) != 3:
        raise Refused(f"{len(frames)} frames, wanted are 3")
    if len(frames[1]) < 8:
        raise Refused("a number has 8 bytes")
    parts = frames[0].decode().split("@")
    pod, model = (parts[1], parts[2]) if len(parts) == 3 else (frames[0].decode(), "")
    batch = msgpack.unpackb(frames[2], strict_map_key=False)
    if not isinstance(batch, list) or len(batch) < 2:
        raise Refused("a batch is an array of 2 or more")
    _check(batch[0], float, int)
    _check(batch[1], list)
    if len(batch) > 2 and batch[2] is not None and _check(batch[2], int) < 0:
        raise Refused("a rank is not negative")
    events = [found for event in batch[1] if (found := _read_event(event)) is not None]
    return Message(pod, model, int.from_bytes(frames[1][:8], "big"), events)


_ORDER = {
    "BlockStored": [
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}
"""Fields in the order that arrays have. What else an event says is passed over."""
_REQUIRED = {"BlockStored": {"block_hashes", "token_ids", "block_size"}, "BlockRemoved": {"block_hashes"}}


def _read_event(event: object) -> Event | None:
    """Reads an event. None: its kind is not known."""
    if isinstance(event, list):
        if not event:
            raise Refused("an event has a tag")
        tag, rest = event[0], event[1:]
        given = dict(zip(_ORDER.get(tag, ()) if isinstance(tag, str) else (), rest, strict=False))
    elif isinstance(event, dict):
        tag, given = event.get("type"), event
    else:
        raise Refused(f"an event is a map or an array, not {event!r}")
    if not isinstance(tag, str):
        raise Refused(f"a tag is text, not {tag!r}")
    if tag not in _ORDER:
        return None
    lacking = _REQUIRED.get(tag, set()) - given.keys()
    if lacking:
        raise Refused(f"{tag} without {sorted(lacking)}")
    fields = {name: _FIELDS[name](given[name]) for name in _ORDER[tag] if given.get(name) is not None}
    # A field that has to be there may not be null.
    for name in _REQUIRED.get(tag, set()) - fields.keys():
        _FIELDS[name](given[name])
    fields.pop("lora_id", None)
    if tag == "BlockStored":
        return Stored(tokens=fields.pop("token_ids"), **fields)
    return Removed(**fields) if tag == "BlockRemoved" else AllCleared()


def _check(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise Refused(f"{value!r} is no {kinds[0].__name__}")
    return value


def _read_hash(value: object) -> int:
    if isinstance(value, bytes):
        if not value:
            raise Refused("a hash has bytes")
        return int.from_bytes(value[-8:], "big")
    return int(_check(value, int)) % 2**64


def _read_token(value: object) -> int:
    if not 0 <= _check(value, int) < 2**32:
        raise Refused(f"{value} is no token of 32 bits")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _read_group(value: object) -> int:
    if _check(value, int) < 0:
        raise Refused("a group is not negative")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _read_extra(value: object) -> list[Any] | None:
    return None if value is None else list(_check(value, list))


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "block_hashes": lambda value: [_read_hash(one) for one in _check(value, list)],
    "parent_block_hash": _read_hash,
    "token_ids": lambda value: [_read_token(one) for one in _check(value, list)],
    "block_size": lambda value: _check(value, int),
    "lora_id": lambda value: _check(value, int),
    "medium": lambda value: _check(value, str),
    "lora_name": lambda value: _check(value, str),
    "extra_keys": lambda value: [_read_extra(one) for one in _check(value, list)],
    "group_idx": _read_group,
    "kv_cache_spec_kind": lambda value: _check(value, str),
    "kv_cache_spec_sliding_window": lambda value: _check(value, int),
}


class Index:
    """Blocks that one pod has, by the keys of requests, which are made of tokens whatever an engine hashes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys: dict[int, RequestKey] = {}
        """Request keys by an engine's hash."""
        self._there: dict[RequestKey, set[tuple[str, int | None]]] = {}
        """Medium and group of each copy, by request key."""

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self._keys.clear()
                self._there.clear()

    def count_tokens(self, tokens: Sequence[int], *, extra: str = "", adapter: str = "", medium: str = "cpu") -> int:
        """How many of a prompt's first tokens are there. `extra`: the first block's key in addition to its tokens."""
        found = 0
        for key in self._name((), tokens, adapter, [[extra]] if extra else None):
            if not any(place == medium for place, _ in self._there.get(key, ())):
                break
            found += self._block_size
        return found

    def _store(self, event: Stored) -> None:
        parent: RequestKey | None = () if not event.parent_block_hash else self._keys.get(event.parent_block_hash)
        if parent is None:
            return
        place = ((event.medium or "gpu").lower(), event.group_idx)
        names = self._name(parent, event.tokens, event.lora_name, event.extra_keys)
        if not names and not event.tokens:
            # Another place of blocks that are known.
            names = [self._keys[one] for one in event.block_hashes if one in self._keys]
        else:
            self._keys.update(zip(event.block_hashes, names, strict=True))
        for name in names:
            self._there.setdefault(name, set()).add(place)

    def _remove(self, event: Removed) -> None:
        place = ((event.medium or "gpu").lower(), event.group_idx)
        for one in event.block_hashes:
            name = self._keys.get(one)
            if name is None or name not in self._there:
                continue
            self._there[name].discard(place)
            if not self._there[name]:
                del self._there[name], self._keys[one]

    def _name(
        self, parent: RequestKey, tokens: Sequence[int], adapter: str, extra: Sequence[Sequence[Any] | None] | None
    ) -> list[RequestKey]:
        names = []
        for at in range(len(tokens) // self._block_size):
            own = tuple(tokens[at * self._block_size : (at + 1) * self._block_size])
            beside = tuple(extra[at] or ()) if extra and at < len(extra) else ()
            # The name of an adapter is there twice: it stands for the model, too.
            beside = tuple(one for one in beside if isinstance(one, str) and one != adapter)
            parent = (hash(parent), own, adapter, beside)
            names.append(parent)
        return names
