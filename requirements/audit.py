"""Lists pinned versions that have known vulnerabilities: `python -m requirements.audit ADVISORIES`, in `make audit`.

ADVISORIES is a folder of JSON files in OSV's format, or an archive of them, such as osv.dev offers for each ecosystem.
No tool on PyPI does this from a local folder: pip-audit, `uv audit`, pysentry and osvcheck ask a service, and safety
reads a database in a format of its own (November 2026).

Exits with 1 where there is a finding, each in one line, and with 2 where nothing could be checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from requirements.advisories import AdvisoryError, find_matches, read_advisories
from requirements.pins import ROOT, PinError, read_pins

FOUND, NOTHING_CHECKED = 1, 2


def main(path: Path, root: Path = ROOT) -> int:
    try:
        advisories, pins = read_advisories(path), read_pins(root)
    except (AdvisoryError, PinError) as fault:
        print(f"nothing was checked: {fault}", file=sys.stderr)
        return NOTHING_CHECKED
    findings = [
        f"{pin.name} {pin.version} ({pin.file}): {match.describe()}"
        for pin in pins
        for match in find_matches(advisories, pin.name, pin.version)
    ]
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings in {len(pins)} pinned versions, by {len(advisories)} advisories")
    return FOUND if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
