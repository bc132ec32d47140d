"""Reads a `kv_hints` envelope, vLLM's own or the same in `kv_transfer_params`, into a request's wishes. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvoffload.connector.common.request_settings import MAX_SESSION_LENGTH, is_session
from kvoffload.protocol import HintAction
from kvoffload.protocol.hints import ACTION_TYPES, ENVELOPE_VERSION, MAX_PRIORITY, MAX_TTL_MS

MAX_ACTIONS = 8
"""Maximum number of actions in an envelope. Further ones are ignored."""
MAX_TYPE_LENGTH = 32
_SESSIONS_ALONE = frozenset({HintAction.PRIORITISE, HintAction.HAND_OVER})
"""The actions that mean nothing without the name of a session."""


class Ignored(StrEnum):
    """The reason why an action is ignored, in the words of the metric."""

    UNKNOWN_ACTION = "unknown_action"
    UNKNOWN_VERSION = "unknown_version"
    WRONG = "wrong"
    TOO_MANY = "too_many"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One action of a request, on its own prefix."""

    action: HintAction
    tokens: int | None = None
    """Number of tokens of the prefix to which the action applies; None: all that the request has."""
    session: str = ""
    ttl_s: float = 0.0
    """How long to retain the prefix, in seconds; 0: the server's default."""
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Read:
    """The content of an envelope."""

    wishes: tuple[Wish, ...] = ()
    ignored: tuple[tuple[str, Ignored], ...] = ()
    """Types of ignored actions, each with the reason; the type is empty if it is not known."""
    complaint: str = ""
    """A short line about the first mistake, or empty."""


NOTHING = Read()


def read_envelope(envelope: object) -> Read:
    """Reads an envelope. Never raises, whatever it holds. None counts as an empty one."""
    if envelope is None:
        return NOTHING
    version, actions = _get(envelope, "protocol_version"), _get(envelope, "actions")
    if not isinstance(version, str) or not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        return Read(
            ignored=(("", Ignored.WRONG),),
            complaint="kv_hints is ignored, it is an object with protocol_version, message_id and a list of actions",
        )
    if version != ENVELOPE_VERSION:
        return Read(ignored=(("", Ignored.UNKNOWN_VERSION),))
    wishes: list[Wish] = []
    ignored: list[tuple[str, Ignored]] = []
    complaint = ""
    for action in actions[:MAX_ACTIONS]:
        name = _get(action, "action_type")
        if not isinstance(name, str) or len(name) > MAX_TYPE_LENGTH:
            found: Wish | _Refusal = _Refusal(Ignored.WRONG, f"an action_type is a text of {MAX_TYPE_LENGTH} letters")
            name = ""
        else:
            found = _read_action(name, action)
        if isinstance(found, Wish):
            wishes.append(found)
        else:
            ignored.append((name, found.why))
            complaint = complaint or found.line
    if len(actions) > MAX_ACTIONS:
        ignored.append(("", Ignored.TOO_MANY))
        complaint = complaint or f"kv_hints has {len(actions)} actions, the first {MAX_ACTIONS} are taken"
    return Read(wishes=tuple(wishes), ignored=tuple(ignored), complaint=complaint)


@dataclass(frozen=True)
class _Refusal:
    why: Ignored
    line: str = ""
    """The complaint for the log; empty: the action is only counted, as it may be meant for other software."""


@dataclass(frozen=True)
class _Item:
    allowed: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _is_whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and _is_number(value, most)


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Describes long numbers by their bits, because Python refuses to print too many digits."""
        bits = x.bit_length()
        return f"a number of {bits} bits" if bits > _SHOWN_BITS else super().repr_int(x, level)


_SHOWN_BITS = 128
_SHORT = _ShortRepr()
_MAX_TTL_S = MAX_TTL_MS / 1000
_MAX_TOKENS = 2**62
_PAYLOAD = {
    "tokens": _Item("a whole number, 0 or more", lambda value: _is_whole(value, _MAX_TOKENS)),
    "session": _Item(f"a text of at most {MAX_SESSION_LENGTH} printable ASCII characters", is_session),
    "ttl_s": _Item(f"a number of seconds from 0 to {_MAX_TTL_S:.0f}", lambda value: _is_number(value, _MAX_TTL_S)),
    "priority": _Item(f"a whole number from 0 to {MAX_PRIORITY}", lambda value: _is_whole(value, MAX_PRIORITY)),
}


def _read_action(name: str, action: object) -> Wish | _Refusal:
    kind = ACTION_TYPES.get(name)
    if kind is None:
        return _Refusal(Ignored.UNKNOWN_ACTION)
    if _get(action, "action_version") != ENVELOPE_VERSION:
        return _Refusal(Ignored.UNKNOWN_VERSION)
    payload = _get(action, "payload")
    if not isinstance(payload, Mapping | None):
        return _Refusal(Ignored.WRONG, f"the action {name} is ignored, its payload is an object")
    # Other items of the payload are ignored, as they may be meant for other software.
    given = {item: value for item in _PAYLOAD if (value := (payload or {}).get(item)) is not None}
    for item, value in given.items():
        if not _PAYLOAD[item].accepts(value):
            line = f"{item}={_SHORT.repr(value)}, allowed is {_PAYLOAD[item].allowed}"
            return _Refusal(Ignored.WRONG, f"the action {name} is ignored: {line}")
    if kind in _SESSIONS_ALONE and not given.get("session"):
        return _Refusal(Ignored.WRONG, f"the action {name} is ignored: it needs the name of a session")
    return Wish(action=kind, **given)


def _get(one: object, name: str) -> object:
    """Returns a field of a JSON object, or of vLLM's own struct."""
    return one.get(name) if isinstance(one, Mapping) else getattr(one, name, None)
