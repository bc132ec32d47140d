"""Fixtures for every unit test of what joins SGLang."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvoffload.sglang.start_up import name_line


@pytest.fixture(autouse=True)
def others_read_their_own_lines() -> Iterator[None]:
    """An engine's start makes the handlers of the whole process add our name to our lines. Other tests do without."""
    yield
    for handler in logging.getLogger().handlers:
        handler.removeFilter(name_line)
