"""Defaults are those of the settings."""

from __future__ import annotations

from pathlib import Path

from kvoffload.client.joining import Member
from kvoffload.client.terms import ClientTerms, LinkTerms
from kvoffload.config.sources import Settings
from kvoffload.protocol import Role


def test_the_defaults_are_those_of_the_settings() -> None:
    settings = Settings()
    terms = ClientTerms(socket=Path("s"), member=Member(engine="e", role=Role.OBSERVER))
    assert terms.step_budget_s == settings.step_budget
    assert LinkTerms().acquire_deadline_s == settings.acquire_deadline
