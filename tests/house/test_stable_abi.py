"""The extension takes from Python what later ones have too, and shows the process nothing but its entry."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.house.tree import ROOT

STABLE_ABI = "0x030C0000"
"""For 3.12 and what follows. The extension for 3.11 may use more, and so may not be the only one that is built."""
BINDINGS = sorted((ROOT / "native/src/bindings").glob("*.[ch]pp"))


@pytest.fixture(scope="module")
def stable_names() -> frozenset[str]:
    """All that Python.h declares or defines for extensions that are to run on 3.12 and what follows."""
    return frozenset(name for option in ("-E", "-dM") for name in preprocess(option))


def preprocess(option: str) -> Iterator[str]:
    command = ["c++", "-x", "c++", "-E", option, f"-DPy_LIMITED_API={STABLE_ABI}"]
    command += [f"-I{sysconfig.get_path('include')}", "-"]
    done = subprocess.run(command, input="#include <Python.h>", capture_output=True, text=True, check=True, timeout=60)
    yield from re.findall(r"\bPy[A-Za-z]+_?\w*", done.stdout)


def test_bindings_use_names_of_the_stable_abi_alone(stable_names: frozenset[str]) -> None:
    assert BINDINGS
    used = {
        f"{path.name}: {name}"
        for path in BINDINGS
        for line in path.read_text().splitlines()
        for name in re.findall(r"\bPy(?:[A-Z][A-Za-z]*_\w+|BUF_\w+)", line.partition("//")[0])
        if name not in stable_names
    }
    assert not used


def test_the_extension_shows_its_entry_alone() -> None:
    """Any other symbol of a static libstdc++ would be mixed with torch's: `import torch` after it ended the process."""
    extension = find_spec("kvoffload._native")
    assert extension is not None
    assert extension.origin is not None
    command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", extension.origin]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["PyInit__native"]
