"""Coverage-guided fuzzing of one target: `python -m tests.fuzz NAME [libFuzzer flags] CORPUS`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder

import atheris

# Files in folders come first: atheris would not instrument modules that an editable install finds by its own loader.
sys.meta_path.remove(PathFinder)
sys.meta_path.insert(0, PathFinder)
with atheris.instrument_imports(include=["kvoffload"]):
    target = import_module(f"tests.fuzz.{sys.argv.pop(1)}")


if __name__ == "__main__":
    atheris.Setup(sys.argv, target.run)
    atheris.Fuzz()
