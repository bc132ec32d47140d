"""Fixtures for every test of this folder."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ENDING_S = 10.0
"""A thread that has been told to end does so."""


@pytest.fixture(scope="module", autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A client or server that a test does not close keeps running during later tests, and holds files."""
    before = threading.enumerate()
    yield
    ours = [one for one in threading.enumerate() if one not in before and one.name.startswith("kvoffload-")]
    for thread in ours:
        thread.join(ENDING_S)
    left = sorted(thread.name for thread in ours if thread.is_alive())
    assert not left, f"not closed: {left}"


@pytest.fixture(autouse=True)
def _log_is_heard() -> Iterator[None]:
    """A connector, of this test or of one before, makes vLLM's logger the parent of ours, and what has configured that
    one in this process may have told it to say errors alone, and nothing to those who listen further up."""
    ours, theirs = logging.getLogger("kvoffload"), logging.getLogger("vllm")
    ours.parent = logging.getLogger()
    # Not by the fixture of that name: a test's own patches are to end before the fixtures that it names first.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(theirs, "level", logging.NOTSET)
        patched.setattr(theirs, "propagate", True)
        ours.setLevel(ours.level)  # so that loggers forget which levels they took to be enabled
        yield


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; those that pytest makes are its own user's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
