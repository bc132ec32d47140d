"""`make audit`: what it says, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from requirements.audit import FOUND, NOTHING_CHECKED, main
from tests.house.advisory_files import REAL


def pin(root: Path, *lines: str) -> Path:
    (root / "requirements").mkdir(exist_ok=True)
    (root / "requirements" / "some.txt").write_text("\n".join(lines))
    return root


def test_a_pinned_version_that_an_advisory_is_about_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = pin(tmp_path, "# why", "PyYAML==5.3 ; python_version < '4'  # old", "torch==2.6.0")
    assert main(REAL, root) == FOUND
    told = "GHSA-8q59-q68h-6hv4 CVE-2020-14343: full_load and FullLoader may run code; fixed in 5.4"
    assert capsys.readouterr().out.splitlines() == [
        f"pyyaml 5.3 (requirements/some.txt): {told}",
        "1 findings in 2 pinned versions, by 3 advisories",
    ]
    assert main(REAL, pin(tmp_path, "pyyaml==5.4", "torch==2.6.0")) == 0


def test_our_own_pins_are_not_what_these_advisories_are_about() -> None:
    assert main(REAL) == 0


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==2.*", "torch==1,<2"])
def test_what_is_not_pinned_is_told(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(REAL, pin(tmp_path, line)) == NOTHING_CHECKED
    assert "pins no version" in capsys.readouterr().err


def test_a_folder_without_advisories_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path, pin(tmp_path, "torch==2.6.0")) == NOTHING_CHECKED
    (tmp_path / "x.json").write_text(json.dumps({"id": 5}))
    assert main(tmp_path, tmp_path) == 0
    assert "has no advisory" in capsys.readouterr().err
