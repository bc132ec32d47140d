"""Every source file has a test file of its name in its place."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.tree import read_texts, tracked_files


def test_every_python_file_has_its_test() -> None:
    files = {str(file) for file in tracked_files()}
    missing = []
    for file in tracked_files():
        if file.parts[0] != "kvoffload" or file.suffix != ".py" or file.name == "__init__.py":
            continue
        inner = Path(*file.parts[1:])
        mirror = str(Path("tests/unit") / inner.parent / f"test_{inner.name}")
        if mirror not in files:
            missing.append(f"{file} wants {mirror}")
    assert missing == []


def test_every_native_file_has_its_test() -> None:
    """A file's own test, or the test of the file it is a part of (sha256_x86 belongs to sha256)."""
    tests = {file.stem.removeprefix("test_") for file in tracked_files() if file.parts[:2] == ("native", "tests")}
    sources = [
        file
        for file in tracked_files()
        if file.parts[:2] == ("native", "src") and file.suffix == ".cpp" and "bindings" not in file.parts
    ]
    assert [str(file) for file in sources if not any(file.stem.startswith(test) for test in tests)] == []


def test_no_test_file_is_a_library() -> None:
    """Code that several tests share lies in tests/kit, or in a file of their folder that has no tests."""
    library = re.compile(r"^\s*(?:from tests[\w.]*\.test_\w+ import|from tests[\w.]* import test_)", flags=re.MULTILINE)
    found = [str(file) for file, text in read_texts().items() if file.suffix == ".py" and library.search(text)]
    assert found == []
    assert library.search("from tests.unit.client.test_client import served")


def test_what_unit_tests_share_lies_in_the_kit() -> None:
    own = ("test_", "conftest", "__init__")
    files = [file for file in tracked_files() if file.parts[:2] == ("tests", "unit") and file.suffix == ".py"]
    assert [str(file) for file in files if not file.name.startswith(own)] == []


def test_every_room_says_what_it_is_for() -> None:
    for file in tracked_files():
        if file.parts[0] == "kvoffload" and file.suffix == ".py":
            first = (Path(__file__).parents[2] / file).read_text().lstrip()
            assert first.startswith(('"""', 'r"""')), f"{file} has no docstring"
