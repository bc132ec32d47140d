"""Code that decodes bytes from outside has a fuzz target, and the list of such code is whole."""

from __future__ import annotations

import re

from tests.fuzz.decoders import NATIVE, NOT_FROM_OUTSIDE, PYTHON
from tests.house.tree import ROOT, read_texts

DECODES = re.compile(
    r"\.unpack(?:_from|b)?\(|\bjson\.loads?\(|\btomllib\.|\bfrombuffer\(|\.from_bytes\(|\.fromhex\(|\bcodec\.decode_\w+\("
)
"""Calls by which this project turns bytes into numbers and structures."""


def test_whatever_takes_bytes_apart_has_a_target_or_says_whose_bytes_they_are() -> None:
    listed = {file for files in PYTHON.values() for file in files} | NOT_FROM_OUTSIDE.keys()
    unlisted = [
        str(file)
        for file, text in read_texts().items()
        if file.parts[0] == "kvoffload" and file.suffix == ".py" and "bench" not in file.parts and DECODES.search(text)
        if str(file) not in listed
    ]
    assert unlisted == [], "list it in tests/fuzz/decoders.py"


def test_what_is_listed_is_there() -> None:
    files = [*NOT_FROM_OUTSIDE, *(file for table in (PYTHON, NATIVE) for some in table.values() for file in some)]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert all(NOT_FROM_OUTSIDE.values())


def test_every_target_is_listed() -> None:
    python = {file.stem for file in (ROOT / "tests" / "fuzz").glob("*.py") if "def make_seeds" in file.read_text()}
    assert python | {"server_core"} == PYTHON.keys()
    native = {file.stem for file in (ROOT / "native" / "fuzz").glob("*.cpp") if "::make_seeds()" in file.read_text()}
    built = re.findall(
        r"^kvoffload_fuzz_target\((\w+)", (ROOT / "native" / "fuzz" / "CMakeLists.txt").read_text(), re.M
    )
    assert native - {"replay_main"} == NATIVE.keys() == set(built)
