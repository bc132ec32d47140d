"""The tree as git sees it: what the house rules look at."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files that are tracked, or new and not ignored, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()))


@cache
def read_texts() -> dict[Path, str]:
    """Every tracked file that is UTF-8 text."""
    texts = {}
    for file in tracked_files():
        data = (ROOT / file).read_bytes()
        if b"\0" not in data:
            texts[file] = data.decode()
    return texts
