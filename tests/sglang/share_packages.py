"""Makes an environment see what is installed where this runs: kvoffload, in editable form, and packages of the versions
that a list asks for. Nothing else of it is seen. The environment also gets the stand-ins for what has no build for a
machine without a GPU.

python -m tests.sglang.share_packages ENVIRONMENT REQUIREMENTS > THE_REST
"""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
NAME = "zz_kvoffload.pth"
FINDER = "_editable_skbc_kvoffload"
"""The module by which an editable install finds what was built."""
OWN = frozenset({"pip", "setuptools"})
"""Every environment has these."""


def share_build(environment: Path) -> Path:
    """Writes the file that does it, which Python reads when it starts there, and returns its path."""
    packages = Path(sysconfig.get_path("purelib"))
    lines = f"import sys; sys.path.append({str(packages)!r}); import {FINDER}; sys.path.remove({str(packages)!r})\n"
    file = _find_packages(environment) / NAME
    file.write_text(f"{lines}{ROOT}\n{STAND_INS}\nimport correct_imports\n")
    return file


def share_packages(environment: Path, requirements: str) -> list[str]:
    """Links those that are here in the version that is asked for; returns the lines of the others."""
    here = {_normalise(one.metadata["Name"]): one for one in distributions()}
    rest = []
    for line in requirements.splitlines():
        name, _, version = line.partition("==")
        found = here.get(_normalise(name))
        if not version or found is None or _normalise(name) in OWN or found.version.partition("+")[0] != version:
            rest.append(line)
        else:
            _link(found, _find_packages(environment))
    return rest


def _link(package: Distribution, target: Path) -> None:
    """By the first parts of its files' names; what lies elsewhere, as its commands do, is left out."""
    for top in sorted({file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}):
        source = Path(str(package.locate_file(top)))
        if not (target / top).exists():
            (target / top).symlink_to(source)
        elif (target / top).resolve() != source.resolve():
            raise FileExistsError(f"{top} of {package.metadata['Name']} is there already")


def _find_packages(environment: Path) -> Path:
    return environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    folder, asked = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    print("\n".join(share_packages(folder, asked.read_text())))
    share_build(folder)
