"""Every source file has a test file of its name in its place."""

from __future__ import annotations

from pathlib import Path

from tests.house.tree import tracked_files


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


def test_every_room_says_what_it_is_for() -> None:
    for file in tracked_files():
        if file.parts[0] == "kvoffload" and file.suffix == ".py":
            first = (Path(__file__).parents[2] / file).read_text().lstrip()
            assert first.startswith(('"""', 'r"""')), f"{file} has no docstring"
