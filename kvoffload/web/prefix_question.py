"""The questions at /v1/prefix: prompts, by their block hashes or tokens, and their identity. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import numpy as np

from kvoffload.keys.prompt_hashes import MAX_LETTERS, MAX_TOKEN, Tokens
from kvoffload.protocol.limits import MAX_BLOCKS
from kvoffload.types import HASH_BYTES
from kvoffload.web.http_message import HttpError

MAX_PROMPTS = 64
MAX_WAIT_MS = 1000
MAX_BODY_BYTES = 4 << 20
NO_LIMIT = 2**64 - 1
TEXT = {"type": "string", "maxLength": MAX_LETTERS}
PROMPT: Mapping[str, Any] = {
    "hashes": {
        "type": "array",
        "maxItems": MAX_BLOCKS,
        "items": {"type": "string", "pattern": "^([0-9a-fA-F]{2}){1,32}$"},
        "description": "of its blocks from the first token on",
    },
    "tokens": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN},
        "description": "all of them, instead of hashes",
    },
    "salt": {**TEXT, "description": "the request's cache_salt, with tokens"},
    "tenant": {**TEXT, "description": "whose blocks are kept apart, with tokens"},
    "limit": {
        "type": "integer",
        "minimum": 0,
        "maximum": NO_LIMIT,
        "description": "tokens up to which a load makes sense; with tokens all but the last one if it is left out",
    },
}
MEANT: Mapping[str, Any] = {
    "identity": {**TEXT, "description": "the first digits of the fingerprint of the one that is meant"},
    "model": {**TEXT, "description": "the model, as the engine names it, of those that are meant"},
    "seed": {**TEXT, "description": "the engine's PYTHONHASHSEED, with tokens"},
}
_ONCE: Mapping[str, Any] = {
    **MEANT,
    "alignment": {
        "type": "integer",
        "minimum": 1,
        "maximum": 2**32 - 1,
        "description": "what is loaded is a multiple of it, in tokens",
    },
    "wait_ms": {
        "type": "integer",
        "minimum": 0,
        "maximum": MAX_WAIT_MS,
        "description": "for tiers on other machines; 0: they are not asked",
    },
}
QUERY = {**PROMPT, **_ONCE}
BODY = {
    "type": "object",
    "properties": {
        **PROMPT,
        **_ONCE,
        "prompts": {
            "type": "array",
            "maxItems": MAX_PROMPTS,
            "items": {"type": "object", "properties": PROMPT, "additionalProperties": False},
            "description": "several, instead of one",
        },
    },
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """By its hashes, or by its tokens if it has them."""

    hashes: bytes = b""
    tokens: Tokens | None = None
    salt: str = ""
    tenant: str = ""
    limit: int = NO_LIMIT


@dataclass(frozen=True, kw_only=True)
class Meant:
    """Which identities are meant: all that there are, if nothing is said of them."""

    identity: str = ""
    """The first digits of its fingerprint."""
    model: str = ""
    seed: str | None = None
    """Of its engines, with tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """About prompts, of the identities that are meant."""

    prompts: tuple[Prompt, ...]
    meant: Meant
    alignment: int = 1
    wait_ms: int = 0
    is_batch: bool = False


def read_query(query: Mapping[str, str]) -> Question:
    """Lists are separated by commas. HttpError: what is wrong, and what is allowed."""
    given: dict[str, Any] = {}
    for name, text in query.items():
        kind = QUERY[name]["type"] if name in QUERY else "string"
        items = text.split(",") if text else []
        if kind == "array":
            given[name] = [_read_number(name, item) for item in items] if name == "tokens" else items
        else:
            given[name] = _read_number(name, text) if kind == "integer" else text
    return read_body(given)


def read_body(given: Mapping[str, Any]) -> Question:
    """Reads a question. HttpError: what is wrong, and what is allowed."""
    prompts = given.get("prompts")
    is_batch = prompts is not None
    check_names(given, {"prompts", *_ONCE} if is_batch else {*PROMPT, *_ONCE})
    if not is_batch:
        prompts = [{name: given[name] for name in PROMPT if name in given}]
    if not isinstance(prompts, list) or len(prompts) > MAX_PROMPTS or not all(isinstance(one, dict) for one in prompts):
        refuse(f"`prompts` is a list of {MAX_PROMPTS} objects at most")
    return Question(
        prompts=tuple(map(read_prompt, prompts)),
        meant=read_meant(given),
        alignment=read_whole(given, "alignment", 1),
        wait_ms=read_whole(given, "wait_ms", 0),
        is_batch=is_batch,
    )


def read_meant(given: Mapping[str, Any]) -> Meant:
    """Reads which identities are meant. HttpError: what is wrong, and what is allowed."""
    identity = read_text(given, "identity").lower()
    if not set(identity) <= set("0123456789abcdef"):
        refuse("`identity` is made of hexadecimal digits")
    seed = read_text(given, "seed") if "seed" in given else None
    return Meant(identity=identity, model=read_text(given, "model"), seed=seed)


def read_prompt(given: Mapping[str, Any]) -> Prompt:
    """Reads one prompt. HttpError: what is wrong, and what is allowed."""
    check_names(given, set(PROMPT))
    if ("hashes" in given) == ("tokens" in given):
        refuse("a prompt has either `hashes` or `tokens`")
    if "tokens" not in given:
        if "salt" in given or "tenant" in given:
            refuse("`salt` and `tenant` go with `tokens`: hashes have them in themselves")
        return Prompt(hashes=_read_hashes(given["hashes"]), limit=read_whole(given, "limit", NO_LIMIT))
    tokens = _read_tokens(given["tokens"])
    # The last token is always computed: what follows it comes out of that.
    limit = read_whole(given, "limit", max(len(tokens) - 1, 0))
    return Prompt(tokens=tokens, salt=read_text(given, "salt"), tenant=read_text(given, "tenant"), limit=limit)


def _read_tokens(given: object) -> Tokens:
    if not isinstance(given, list) or not set(map(type, given)) <= {int}:
        refuse(f"`tokens` is a list of whole numbers from 0 to {MAX_TOKEN}")
    if given and not 0 <= min(given) <= max(given) <= MAX_TOKEN:
        refuse(f"`tokens` has {min(given)} to {max(given)}, allowed is 0 to {MAX_TOKEN}")
    return np.array(given, np.int64)


def _read_hashes(given: object) -> bytes:
    """Shorter ones are of algorithms with smaller digests."""
    if not isinstance(given, list) or len(given) > MAX_BLOCKS:
        refuse(f"`hashes` is a list of {MAX_BLOCKS} at most")
    try:
        found = [bytes.fromhex(one) for one in given]
    except (TypeError, ValueError):
        found = [b""]
    if not all(1 <= len(one) <= HASH_BYTES for one in found):
        refuse(f"a hash is text of 2 to {2 * HASH_BYTES} hexadecimal digits")
    return b"".join(one.ljust(HASH_BYTES, b"\0") for one in found)


def _read_number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 20:
        refuse(f"`{name}` has something that is no whole number")
    return int(text)


def read_whole(
    given: Mapping[str, Any], name: str, default: int, schemas: Mapping[str, Mapping[str, Any]] = QUERY
) -> int:
    """Reads a whole number. HttpError: it is none, or out of its schema's bounds."""
    schema = schemas[name]
    value = given.get(name, default)
    if type(value) is not int or not schema["minimum"] <= value <= schema["maximum"]:
        refuse(f"`{name}` is a whole number from {schema['minimum']} to {schema['maximum']}")
    return value


def read_text(given: Mapping[str, Any], name: str) -> str:
    """Reads a text. HttpError: it is none, or too long."""
    value = given.get(name, "")
    if not isinstance(value, str) or len(value) > MAX_LETTERS or not value.isprintable():
        refuse(f"`{name}` is text of {MAX_LETTERS} printable letters at most")
    return value


def check_names(given: Mapping[str, Any], allowed: set[str]) -> None:
    """Checks what is said. HttpError: something that is not known here."""
    unknown = sorted(given.keys() - allowed)
    if unknown:
        refuse(f"{unknown[0][:40]!r} is not asked here, allowed are {', '.join(sorted(allowed))}")


def refuse(text: str) -> NoReturn:
    """Refuses a question that has something wrong in it."""
    raise HttpError(HTTPStatus.BAD_REQUEST, text)
