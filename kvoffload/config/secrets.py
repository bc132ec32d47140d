"""Which parts of a text that a user wrote are secrets, and how such a text is printed without them."""

from __future__ import annotations

import re

MASK = "***"
HIDDEN = "(hidden)"

_AFTER_SCHEME = re.compile(r"(?<=://).*@", re.DOTALL)
"""To the last @: a password may have an @, a slash or a space in it."""
_WITHOUT_SCHEME = re.compile(r"(?<![^\s\"'=,(\[{])[^\s\"'/=,:]*:(?!//)[^\s\"']*@")
_PARAMETER = re.compile(r"([?&;][\w.-]*(?:pass|secret|token|key|auth|sig)[\w.-]*=)[^&;\s\"']*", re.IGNORECASE)


def mask_secrets(text: str) -> str:
    """Returns the text without users and passwords of addresses, and without parameters that are named like secrets."""
    text = _AFTER_SCHEME.sub(f"{MASK}@", text)
    text = _WITHOUT_SCHEME.sub(f"{MASK}@", text)
    return _PARAMETER.sub(rf"\1{MASK}", text)


def has_secrets(text: str) -> bool:
    """Returns whether `mask_secrets` changes the text."""
    return mask_secrets(text) != text
