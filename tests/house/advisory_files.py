"""Advisories as files."""

from __future__ import annotations

from pathlib import Path

REAL = Path(__file__).parent / "advisories"
