"""The exact versions that requirements/*.txt name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[1]


class PinError(Exception):
    """A line pins nothing."""


@dataclass(frozen=True, order=True)
class Pin:
    """A package of one version, and the file that says so."""

    name: NormalizedName
    version: str
    file: str
    marker: str = ""


def read_pins(root: Path = ROOT) -> list[Pin]:
    """All there are, sorted. PinError."""
    pins: set[Pin] = set()
    for file in sorted((root / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            text = line.partition("#")[0].strip()
            if text:
                pins.add(_read_pin(text, f"requirements/{file.name}"))
    return sorted(pins)


def _read_pin(text: str, file: str) -> Pin:
    wanted = Requirement(text)
    match list(wanted.specifier):
        case [bound] if bound.operator == "==" and "*" not in bound.version:
            return Pin(canonicalize_name(wanted.name), bound.version, file, str(wanted.marker or ""))
    raise PinError(f"{file}: {text} pins no version")
