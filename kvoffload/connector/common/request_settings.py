"""The wishes that a single request may have for the cache, in vLLM's flat `kv_transfer_params`."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

MAX_PIN_S = 3600.0
MAX_TENANT_LENGTH = 64
MAX_SESSION_LENGTH = 64
MAX_KEY_LENGTH = 32
"""Letters of a key above which it is not compared with the names of our wishes."""


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """One request's wishes; each default is what a request without any gets."""

    skip_load: bool = False
    """Compute everything that the engine has not itself."""
    skip_save: bool = False
    """Save nothing that this request computes."""
    max_load_tokens: int | None = None
    """Maximum number of tokens to load from the cache; None for no limit."""
    max_save_tokens: int | None = None
    """Number of tokens beyond which nothing is saved; None for no limit."""
    prompt_only: bool = False
    """Save nothing that this request decodes."""
    expect_tokens: int = 0
    """Number of its first tokens that another engine has computed and saves: the request waits for them."""
    expected_hit_tokens: int = 0
    """Number of its first tokens that a router expected to be here when it chose this engine. It is compared with the
    hit, and changes nothing."""
    receipt: bool = False
    """Whether the engine's answer says where the tokens of the prompt came from."""
    pin_s: float = 0.0
    """How long its blocks should be kept from eviction, in seconds."""
    tenant: str = ""
    session: str = ""
    """The name of the agent's session whose turn the request is."""
    session_ttl_s: float = 0.0
    """How long the session's blocks should be kept from eviction until its next turn, in seconds."""

    def find_save_limit(self, prompt_tokens: int) -> int | None:
        """Returns the number of tokens beyond which nothing of such a request is saved; None: there is no limit."""
        if not self.prompt_only:
            return self.max_save_tokens
        return prompt_tokens if self.max_save_tokens is None else min(prompt_tokens, self.max_save_tokens)


NO_SETTINGS = RequestSettings()


class _Term(NamedTuple):
    allowed: str
    accepts: Callable[[Any], bool]


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_token_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_pin_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_PIN_S


def is_session(value: Any) -> bool:
    """Returns whether this value may name an agent's session."""
    # It goes into messages as one line of text.
    return isinstance(value, str) and len(value) <= MAX_SESSION_LENGTH and value.isascii() and value.isprintable()


def _is_tenant(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TENANT_LENGTH


_SETTINGS = {
    "skip_load": _Term("true or false", _is_flag),
    "skip_save": _Term("true or false", _is_flag),
    "max_load_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "max_save_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "prompt_only": _Term("true or false", _is_flag),
    "expect_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "expected_hit_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "receipt": _Term("true or false", _is_flag),
    "pin_s": _Term(f"a number of seconds from 0 to {MAX_PIN_S:.0f}", _is_pin_time),
    "tenant": _Term(f"a text of at most {MAX_TENANT_LENGTH} characters", _is_tenant),
    "session": _Term(f"a text of at most {MAX_SESSION_LENGTH} printable ASCII characters", is_session),
    "session_ttl_s": _Term(f"a number of seconds from 0 to {MAX_PIN_S:.0f}", _is_pin_time),
}


@lru_cache(maxsize=256)
def _find_meant(name: str) -> str:
    """Returns a line about a key that is nearly one of ours, or "". Keys of other connectors are not."""
    meant = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.85) if len(name) <= MAX_KEY_LENGTH else []
    return f"{reprlib.repr(name)} is ignored, perhaps {meant[0]} is meant" if meant else ""


def read_settings(params: Mapping[str, object], session: str = "") -> tuple[RequestSettings, str]:
    """Returns the wishes, and a line about values that are not allowed. Those keep their defaults.

    `session` is the engine's own name for the request's session, used if a time is set without a name. Unknown keys
    belong to other connectors, and are ignored; the line names one that is nearly a name of ours. None counts as
    absent, because clients write null for it.
    """
    given = {name: value for name in _SETTINGS if (value := params.get(name)) is not None}
    wrong = {name for name, value in given.items() if not _SETTINGS[name].accepts(value)}
    taken: dict[str, Any] = {name: value for name, value in given.items() if name not in wrong}
    # Clients' values go into the log: cut short, and without line breaks.
    complaints = [
        f"{name}={reprlib.repr(given[name])} is ignored, allowed is {_SETTINGS[name].allowed}"
        for name in _SETTINGS
        if name in wrong
    ]
    complaints += filter(None, (_find_meant(name) for name in params if name not in _SETTINGS))
    if taken.get("session_ttl_s") and "session" not in given and is_session(session):
        # The engine has a name for it already.
        taken["session"] = session
    return RequestSettings(**taken), "; ".join(complaints)
