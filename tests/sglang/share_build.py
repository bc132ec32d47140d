"""Makes an environment see the kvoffload that is installed in editable form where this runs, and nothing else of it.

python -m tests.sglang.share_build ENVIRONMENT
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "zz_kvoffload.pth"
FINDER = "_editable_skbc_kvoffload"
"""The module by which an editable install finds what was built."""


def share_build(environment: Path) -> Path:
    """The file that does it: what Python runs when it starts there."""
    packages = Path(sysconfig.get_path("purelib"))
    folder = environment / packages.relative_to(sys.prefix)
    lines = f"import sys; sys.path.append({str(packages)!r}); import {FINDER}; sys.path.remove({str(packages)!r})\n"
    file = folder / NAME
    file.write_text(f"{lines}{ROOT}\n")
    return file


if __name__ == "__main__":
    print(share_build(Path(sys.argv[1]).absolute()))
