"""Fixtures for every test of the connector."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_private_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's connector starts one as soon as it is made; these workers have a cache of their own."""
    try:
        from kvoffload.connector.start_up import EngineStart
    except ImportError:
        return  # without vLLM there is no connector
    monkeypatch.setattr(EngineStart, "begin_for_worker", lambda start: None)
