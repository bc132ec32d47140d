"""What both engines are asked, and how they tell what became of it."""

from __future__ import annotations

PAGE = 32
"""Tokens of a block in vLLM, and of a page in SGLang."""
PROMPT = [(17 * at + 5 * at * at) % 500 + 3 for at in range(10 * PAGE + 5)]
NEW_TOKENS = 8


def tell(name: str, *, first: int, again: int, is_equal: bool) -> None:
    """A line that `run.py` passes on."""
    print(
        f"{name:<6}: {first} of {len(PROMPT)} tokens were cached at first, {again} when its own cache was emptied; "
        f"answers {'equal' if is_equal else 'DIFFER'}",
        flush=True,
    )
