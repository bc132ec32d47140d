"""Another thread that holds a cache's writers' lock while the tested code must not wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvoffload import native

HELD_MS = 20_000
"""Longest hold, in milliseconds. Code that waits for the lock waits so long, and the test fails."""


@contextmanager
def held_writer(core: native.Cache) -> Iterator[None]:
    """Holds the writer as long as the block runs; nothing in it has waited for the lock."""
    told, until = os.eventfd(0), os.eventfd(0)
    try:
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(core.hold_writer, told, until, HELD_MS)
            os.eventfd_read(told)
            try:
                yield
                assert not held.done(), "somebody waited for the writers' lock"
            finally:
                os.eventfd_write(until, 1)
            assert held.result()
    finally:
        os.close(told)
        os.close(until)
