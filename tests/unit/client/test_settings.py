"""Defaults are those of the settings."""

from __future__ import annotations

from pathlib import Path

from kvoffload.cache import CacheGeometry
from kvoffload.client import add_report_text, describe_blocks
from kvoffload.client.joining import Member
from kvoffload.client.settings import ClientSettings, LinkSettings
from kvoffload.config.sources import Settings
from kvoffload.protocol import Role
from kvoffload.protocol.limits import MAX_REPORT
from tests.kit.cache.cache_model import HYBRID, fingerprint


def test_the_defaults_are_those_of_the_settings() -> None:
    settings = Settings()
    client_settings = ClientSettings(socket=Path("s"), member=Member(engine="e", role=Role.OBSERVER))
    assert client_settings.step_budget_s == settings.step_budget
    assert LinkSettings().acquire_deadline_s == settings.acquire_deadline


def test_a_geometry_arrives_as_it_was() -> None:
    message = describe_blocks(
        fingerprint("m"), HYBRID, hash_algorithm="sha256", hash_seed=bytes(32), rank=1, ranks=2, tenant="t"
    )
    assert CacheGeometry.read(message) == HYBRID
    assert (message.fingerprint, message.hash_algorithm) == (fingerprint("m"), "sha256")
    assert (message.hash_seed, message.rank, message.ranks, message.tenant) == (bytes(32), 1, 2, "t")


def test_of_a_report_whole_lines_are_told() -> None:
    register = describe_blocks(fingerprint("m"), HYBRID, hash_algorithm="sha256")
    assert add_report_text(register, "one\ntwo").report == b"one\ntwo"
    lines = "a line of some length\n" * 4000
    told = add_report_text(register, lines).report.decode()
    assert MAX_REPORT - 30 < len(told) <= MAX_REPORT
    assert lines.startswith(told)
    assert told.endswith("\n")
    assert add_report_text(register, "x" * 2 * MAX_REPORT).report == b""
