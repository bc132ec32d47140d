"""Shared values."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from kvoffload.types import HASH_BYTES, AcquireOutcome, ReuseRule

NATIVE = Path(__file__).parents[2] / "native/src"


def list_native_names(header: str, enum: str) -> list[str]:
    """Returns the names of a C++ enum, which are numbered from 0 on."""
    body = re.search(rf"enum class {enum} : std::uint8_t {{(.*?)}};", (NATIVE / header).read_text(), re.DOTALL)
    assert body is not None
    return re.findall(r"^\s*(\w+),", body[1], re.MULTILINE)


def test_a_hash_is_as_long_as_a_sha256() -> None:
    assert hashlib.sha256().digest_size == HASH_BYTES


def test_rules_have_the_numbers_of_the_native_core() -> None:
    names = [
        "exact_boundary" if name == "exact" else name
        for name in list_native_names("index/boundary.hpp", "BoundaryRule")
    ]
    assert {rule.label: rule.value for rule in ReuseRule} == {name: number for number, name in enumerate(names)}


def test_outcomes_have_the_numbers_of_the_native_core() -> None:
    names = list_native_names("cache/leases.hpp", "AcquireOutcome")
    assert {outcome.name.lower(): outcome.value for outcome in AcquireOutcome} == {
        name: number for number, name in enumerate(names)
    }
