"""The bill of materials has every pinned version, and is the same each time."""

from __future__ import annotations

import json
from pathlib import Path

from requirements.pins import read_bounds, read_pins
from requirements.sbom import LINKED, main, make_bill
from tests.house.tree import ROOT


def test_every_pin_and_every_dependency_of_the_package_is_in_it() -> None:
    pins, bounds = read_pins(), read_bounds()
    bill = make_bill(pins, bounds, "1.2.3")
    of_trials = [one for one in bill["components"] if one["bom-ref"].endswith("sglang.txt")]
    scopes = {one["name"]: one["scope"] for one in bill["components"] if one not in of_trials}
    assert {one["scope"] for one in of_trials} == {"excluded"}
    lines = [line for file in (ROOT / "requirements").glob("*.txt") for line in file.read_text().splitlines()]
    assert len(bill["components"]) == sum("==" in line.partition("#")[0] for line in lines)
    assert {name for name, scope in scopes.items() if scope == "required"} == {*bounds.runtime, *LINKED}
    assert (scopes["obstore"], scopes["torch"], scopes["pytest"]) == ("optional", "optional", "excluded")
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/kvoffload@1.2.3"


def test_references_are_unique_and_lead_somewhere() -> None:
    bill = make_bill(read_pins(), read_bounds(), "1.2.3")
    own = bill["metadata"]["component"]["bom-ref"]
    references = [own, *(one["bom-ref"] for one in bill["components"])]
    assert len(set(references)) == len(references)
    assert [one["ref"] for one in bill["dependencies"]] == references
    required = bill["dependencies"][0]["dependsOn"]
    assert set(required) < set(references)
    assert len(required) == len(read_bounds().runtime) + len(LINKED)


def test_the_same_tree_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        main(tmp_path / "folder" / name)
    one, other = ((tmp_path / "folder" / name).read_bytes() for name in ("one", "other"))
    assert one == other
    assert json.loads(one)["bomFormat"] == "CycloneDX"
