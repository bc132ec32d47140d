"""Things that must not be in the tree."""

from __future__ import annotations

import re

from tests.house.tree import ROOT, read_texts, tracked_files

MAX_BLOB_BYTES = 500_000
MAX_LINES = 600

# An absolute path that a machine must have anyway, or that a document uses as an example.
ALLOWED_PATHS = re.compile(
    r"/(?:proc|sys|dev|run/(?:kvoffload\b|user\b)|usr/bin/env$|bin/(?:ba)?sh$|usr/local/cuda$)",
)
TOP_FOLDERS = "home|root|work|tmp|opt|mnt|srv|var|etc|usr|Users|data|run|proc|sys|dev|bin"
ABSOLUTE_PATH = re.compile(rf"(?<![\w.}}$)\]/<-])/(?:{TOP_FOLDERS})(?:/[\w.-]+)+")
HOUSE = "tests/house/test_tree.py"


def test_absolute_paths_come_from_the_allow_list() -> None:
    found = [
        f"{file}: {match}"
        for file, text in read_texts().items()
        if str(file) != HOUSE
        for match in ABSOLUTE_PATH.findall(text)
        if not ALLOWED_PATHS.match(match)
    ]
    assert found == []


def test_the_path_rule_sees_a_path_of_one_machine() -> None:
    assert ABSOLUTE_PATH.findall("open('/opt/joe/x') https://host/opt/x ./opt/x $HOME/data/x") == ["/opt/joe/x"]


def test_no_blob_is_large() -> None:
    assert [str(file) for file in tracked_files() if (ROOT / file).stat().st_size > MAX_BLOB_BYTES] == []


def test_no_binary_is_committed() -> None:
    binaries = [
        str(file) for file in tracked_files() if file not in read_texts() and file.suffix not in (".png", ".webp")
    ]
    assert binaries == []


def test_no_source_file_is_long() -> None:
    sources = {".py", ".pyi", ".cpp", ".hpp", ".cu"}
    long = [str(file) for file, text in read_texts().items() if file.suffix in sources and text.count("\n") > MAX_LINES]
    assert long == []


def test_dangerous_calls_are_absent() -> None:
    """No pickle, no eval: bytes from outside are never code."""
    banned = re.compile(r"\b(?:import pickle|from pickle|pickle\.loads?|eval\(|exec\(|yaml\.load\()")
    found = [
        f"{file}: {match}"
        for file, text in read_texts().items()
        if file.parts[0] == "kvoffload" and file.suffix == ".py"
        for match in banned.findall(text)
    ]
    assert found == []


def test_the_environment_is_read_in_one_place() -> None:
    readers = [
        str(file)
        for file, text in read_texts().items()
        if file.parts[0] == "kvoffload" and file.suffix == ".py" and re.search(r"\bos\.(?:environ|getenv)", text)
    ]
    assert readers == ["kvoffload/config/sources.py"]


def test_modules_are_imported_by_their_names_in_few_places() -> None:
    """Of these, only the first imports what a setting names. What reads messages of clients cannot import it."""
    importers = [
        str(file)
        for file, text in read_texts().items()
        if file.parts[0] == "kvoffload" and file.suffix == ".py" and re.search(r"\bimport_module\(|__import__", text)
    ]
    assert importers == [
        "kvoffload/cli/below.py",
        "kvoffload/connector/engine/pretended_gpu.py",
        "kvoffload/tiers/store_child.py",
    ]


def test_merge_marks_and_tabs_are_absent() -> None:
    for file, text in read_texts().items():
        assert not re.search(r"^(<{7}|>{7}) ", text, re.M), f"{file}: merge mark"
        if file.suffix == ".py":
            assert "\t" not in text, f"{file}: tab"
