"""What a single request may ask of the cache, in vLLM's flat `kv_transfer_params`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_PIN_S = 3600.0
MAX_TENANT_LENGTH = 64
MAX_SESSION_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class RequestTerms:
    """One request's wishes; each default is what a request without any gets."""

    skip_load: bool = False
    """Compute everything that the engine has not itself."""
    skip_save: bool = False
    """Save nothing that this request computes."""
    max_load_tokens: int | None = None
    """At most so many tokens from the cache; None for no limit."""
    max_save_tokens: int | None = None
    """Nothing is saved beyond so many tokens; None for no limit."""
    prompt_only: bool = False
    """Save nothing that this request decodes."""
    expect_tokens: int = 0
    """Another engine has computed so many of its first tokens, and saves them: they are waited for."""
    expected_hit_tokens: int = 0
    """A router has sent it here because it took so many of its first tokens to be there: this is compared with what is
    hit, and changes nothing."""
    pin_s: float = 0.0
    """How long its blocks should be kept from eviction."""
    tenant: str = ""
    session: str = ""
    """An agent's, whose turn it is."""
    session_ttl_s: float = 0.0
    """How long what the session has so far should be kept from eviction, until its next turn."""

    def find_save_limit(self, prompt_tokens: int) -> int | None:
        """Tokens beyond which nothing is saved of a request with such a prompt; None: there is no limit."""
        if not self.prompt_only:
            return self.max_save_tokens
        return prompt_tokens if self.max_save_tokens is None else min(prompt_tokens, self.max_save_tokens)


NO_TERMS = RequestTerms()


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
    """Says whether it may name an agent's session."""
    # It goes into messages as one line of text.
    return isinstance(value, str) and len(value) <= MAX_SESSION_LENGTH and value.isascii() and value.isprintable()


def _is_tenant(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TENANT_LENGTH


_TERMS = {
    "skip_load": _Term("true or false", _is_flag),
    "skip_save": _Term("true or false", _is_flag),
    "max_load_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "max_save_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "prompt_only": _Term("true or false", _is_flag),
    "expect_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "expected_hit_tokens": _Term("a whole number, 0 or more", _is_token_count),
    "pin_s": _Term(f"a number of seconds from 0 to {MAX_PIN_S:.0f}", _is_pin_time),
    "tenant": _Term(f"a text of at most {MAX_TENANT_LENGTH} characters", _is_tenant),
    "session": _Term(f"a text of at most {MAX_SESSION_LENGTH} printable ASCII characters", is_session),
    "session_ttl_s": _Term(f"a number of seconds from 0 to {MAX_PIN_S:.0f}", _is_pin_time),
}


def read_terms(params: Mapping[str, object], session: str = "") -> tuple[RequestTerms, str]:
    """The terms, and one line about values that are not allowed: those terms stay at their defaults, nothing fails.

    `session`: what the engine itself calls the request's, which counts where a time is set and no name. Keys that we do
    not know are another connector's. None is as good as absent: clients write null for it.
    """
    given = {name: value for name in _TERMS if (value := params.get(name)) is not None}
    wrong = {name for name, value in given.items() if not _TERMS[name].accepts(value)}
    taken: dict[str, Any] = {name: value for name, value in given.items() if name not in wrong}
    # A stranger's value goes into a log: cut short, and without line breaks.
    complaints = [
        f"{name}={reprlib.repr(given[name])} is ignored, allowed is {_TERMS[name].allowed}"
        for name in _TERMS
        if name in wrong
    ]
    if taken.get("session_ttl_s") and "session" not in given and is_session(session):
        # The engine has a name for it already.
        taken["session"] = session
    return RequestTerms(**taken), "; ".join(complaints)
