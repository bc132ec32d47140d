"""The findings of an examination: a line, how bad it is, and the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"
    """Works, but slower or with less than it could."""
    FAIL = "fail"
    """Does not work as the settings say."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`remedy`: a command to paste where there is one; empty where all is well."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict is Verdict.OK) == (not self.remedy), self


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, text=text)


def warn(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARN, text=text, remedy=remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.FAIL, text=text, remedy=remedy)
