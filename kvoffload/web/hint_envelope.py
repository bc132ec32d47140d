"""The body of /v1/hints: vLLM's envelope of actions, with the prompt of each in its payload. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kvoffload.protocol import HintAction
from kvoffload.protocol.hints import ACTION_TYPES, ENVELOPE_VERSION, MAX_PRIORITY, MAX_TTL_MS
from kvoffload.protocol.limits import NAME_BYTES
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import (
    MEANT,
    NO_LIMIT,
    PROMPT,
    TEXT,
    Meant,
    Prompt,
    check_names,
    read_meant,
    read_prompt,
    read_text,
    read_whole,
    refuse,
)

MAX_ACTIONS = 16
MAX_TTL_S = MAX_TTL_MS // 1000
_ONLY_SESSION = (HintAction.RETAIN, HintAction.RELEASE, HintAction.PRIORITISE, HintAction.HAND_OVER)
"""May do without a prompt."""
_WISH: Mapping[str, Any] = {
    "session": {"type": "string", "maxLength": NAME_BYTES, "description": "whose retention it is"},
    "ttl_s": {
        "type": "number",
        "minimum": 0,
        "maximum": MAX_TTL_S,
        "description": "how long it is retained; 0, or left out: ten minutes, or as before",
    },
    "priority": {
        "type": "integer",
        "minimum": 0,
        "maximum": MAX_PRIORITY,
        "description": "the higher, the later it gives way",
    },
}
_PAYLOAD: Mapping[str, Any] = {**PROMPT, **MEANT, **_WISH}
BODY: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "protocol_version": {
            **TEXT,
            "description": f'"{ENVELOPE_VERSION}"; another one is ignored, with all its actions',
        },
        "message_id": TEXT,
        "actions": {
            "type": "array",
            "maxItems": MAX_ACTIONS,
            "items": {
                "type": "object",
                "properties": {
                    "action_id": TEXT,
                    "action_type": {**TEXT, "description": f"{', '.join(ACTION_TYPES)}; others are ignored"},
                    "action_version": {**TEXT, "description": f'"{ENVELOPE_VERSION}"; others are ignored'},
                    "payload": {
                        "type": "object",
                        "properties": {
                            **_PAYLOAD,
                            "tokens": {
                                "oneOf": [PROMPT["tokens"], {"type": "integer", "minimum": 0}],
                                "description": "all token ids; beside hashes a number, the same as `limit`",
                            },
                        },
                    },
                },
                "required": ["action_id", "action_type", "action_version", "payload"],
            },
        },
    },
    "required": ["protocol_version", "message_id", "actions"],
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Action:
    """One action that the sender asks for."""

    name: str
    """The sender's name for the action."""
    kind: str
    does: HintAction
    meant: Meant
    prompt: Prompt | None
    """None: the session's, whatever it is."""
    session: str = ""
    ttl_ms: int = 0
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class IgnoredAction:
    """One that is not known here."""

    name: str
    kind: str
    why: str
    """`unknown_action`, or `unknown_version`."""


@dataclass(frozen=True, kw_only=True)
class Envelope:
    message_id: str
    actions: tuple[Action | IgnoredAction, ...]


def read_envelope(given: Mapping[str, Any]) -> Envelope:
    """Reads an envelope. HttpError: what is wrong, and what is allowed; then nothing of it is done."""
    check_names(given, {"protocol_version", "message_id", "actions"})
    version, message_id = read_text(given, "protocol_version"), read_text(given, "message_id")
    actions = given.get("actions")
    if not isinstance(actions, list) or len(actions) > MAX_ACTIONS or not all(isinstance(one, dict) for one in actions):
        refuse(f"`actions` is a list of {MAX_ACTIONS} objects at most")
    return Envelope(
        message_id=message_id, actions=tuple(_read_action(at, one, version) for at, one in enumerate(actions))
    )


def _read_action(at: int, given: Mapping[str, Any], envelope_version: str) -> Action | IgnoredAction:
    try:
        name, kind = read_text(given, "action_id"), read_text(given, "action_type")
        version, payload = read_text(given, "action_version"), given.get("payload", {})
        if not isinstance(payload, dict):
            refuse("`payload` is an object")
        if envelope_version != ENVELOPE_VERSION or version != ENVELOPE_VERSION:
            return IgnoredAction(name=name, kind=kind, why="unknown_version")
        if kind not in ACTION_TYPES:
            return IgnoredAction(name=name, kind=kind, why="unknown_action")
        return _read_payload(name, kind, payload)
    except HttpError as fault:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"actions[{at}]: {fault}") from fault


def _read_payload(name: str, kind: str, given: Mapping[str, Any]) -> Action:
    check_names(given, set(_PAYLOAD))
    does, session, ttl_s = ACTION_TYPES[kind], read_text(given, "session"), given.get("ttl_s", 0)
    if len(session.encode()) > NAME_BYTES:
        refuse(f"`session` has {NAME_BYTES} bytes at most")
    if type(ttl_s) not in (int, float) or not 0 <= ttl_s <= MAX_TTL_S:
        refuse(f"`ttl_s` is a number from 0 to {MAX_TTL_S}")
    prompt = {part: given[part] for part in PROMPT if part in given}
    if type(prompt.get("tokens")) is int:
        # As an engine says it, which knows the prompt.
        prompt["limit"] = prompt.pop("tokens")
        read_whole(prompt, "limit", NO_LIMIT)
    if does is not HintAction.PREFETCH:
        # A request after a kept prompt needs all of it; a prefetched prompt's own computes the last token anyway.
        prompt.setdefault("limit", NO_LIMIT)
    has_prompt = "hashes" in prompt or "tokens" in prompt
    if not has_prompt and not (session and does in _ONLY_SESSION):
        refuse(f"{kind} needs a prompt, by `hashes` or `tokens`{' or a `session`' if does in _ONLY_SESSION else ''}")
    if does is HintAction.HAND_OVER and not session:
        refuse("hand_over needs a `session`")
    return Action(
        name=name,
        kind=kind,
        does=does,
        meant=read_meant(given),
        prompt=read_prompt(prompt) if has_prompt else None,
        session=session,
        ttl_ms=int(ttl_s * 1000),
        priority=read_whole(given, "priority", 0, _WISH),
    )
