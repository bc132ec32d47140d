"""Writes a bill of materials, CycloneDX 1.6: `python -m requirements.sbom FILE`, in `make sbom`.

It lists the package and every version that is pinned, with whether the package needs it to run (`required`), for one of
its extras (`optional`), or not at all (`excluded`: tests, gates and tools). The same tree makes the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload import __version__
from requirements.pins import Bounds, Pin, read_bounds, read_pins

LINKED = {
    "nanobind": "its library is linked into the extension",
    "ziglang": "its C++ library is linked into the wheels of a release",
}
"""Of what builds the package: what is in it then."""
_DEVELOPMENT = ("test",)
"""Extras for who works on it."""
_TRIALS = ("requirements/sglang.txt",)
"""Environments of engines that are there for tests alone, whatever of the package's own requirements they hold."""


def make_bill(pins: Sequence[Pin], bounds: Bounds, version: str) -> dict[str, Any]:
    own = f"pkg:pypi/{bounds.name}@{version}"
    extras = {name for extra, names in bounds.extras.items() if extra not in _DEVELOPMENT for name in names}
    components = [_describe(pin, bounds, extras) for pin in pins]
    required = [one["bom-ref"] for one in components if one["scope"] == "required"]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": bounds.name,
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": bounds.license}}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": required},
            *({"ref": one["bom-ref"]} for one in components),
        ],
    }


def _describe(pin: Pin, bounds: Bounds, extras: set[str]) -> dict[str, Any]:
    if pin.file in _TRIALS:
        scope = "excluded"
    elif pin.name in bounds.runtime or pin.name in LINKED:
        scope = "required"
    else:
        scope = "optional" if pin.name in extras else "excluded"
    facts = {
        "file": pin.file,
        "marker": pin.marker,
        "allowed": bounds.runtime.get(pin.name, ""),
        "linked": LINKED.get(pin.name, ""),
    }
    purl = f"pkg:pypi/{pin.name}@{pin.version}"
    return {
        "type": "library",
        "bom-ref": f"{purl}?file={pin.file}",
        "name": pin.name,
        "version": pin.version,
        "scope": scope,
        "purl": purl,
        "properties": [{"name": f"kvoffload:{name}", "value": value} for name, value in facts.items() if value],
    }


def main(file: Path) -> None:
    bill = make_bill(read_pins(), read_bounds(), __version__)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(bill, indent=2) + "\n")
    print(f"{file}: {len(bill['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
