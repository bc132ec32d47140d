"""Both engines are asked this, and tell in this way what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable

PAGE = 32
"""Tokens of a block in vLLM, and of a page in SGLang."""
PROMPT = [(17 * at + 5 * at * at) % 500 + 3 for at in range(10 * PAGE + 5)]
NEW_TOKENS = 8
FLUSH_WAIT_S = 60.0
LOOK_S = 0.05


def await_flush(flush: Callable[[], bool]) -> None:
    """An engine empties its own cache when it has put its last request away, and refuses before."""
    until_s = time.monotonic() + FLUSH_WAIT_S
    while not flush():
        if time.monotonic() >= until_s:
            raise SystemExit(f"the engine has not emptied its own cache in {FLUSH_WAIT_S:.0f} s")
        time.sleep(LOOK_S)


def tell(name: str, *, first: int, again: int, is_equal: bool) -> None:
    """A line that `run.py` passes on."""
    print(
        f"{name:<6}: {first} of {len(PROMPT)} tokens were cached at first, {again} when its own cache was emptied; "
        f"answers {'equal' if is_equal else 'DIFFER'}",
        flush=True,
    )
