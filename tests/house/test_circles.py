"""No module imports itself by way of others, not even for its types, and no room either: of two files, and of two
folders, one can be read without the other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house.tree import ROOT, tracked_files


def read_imports() -> dict[str, set[str]]:
    """Returns by module those of kvoffload that it imports anywhere."""
    modules = {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__"): file
        for file in tracked_files()
        if file.parts[0] == "kvoffload" and file.suffix == ".py"
    }
    return {
        name: {found for found in find_imports((ROOT / file).read_text(), modules) if found != name}
        for name, file in modules.items()
    }


def find_imports(source: str, modules: Mapping[str, object]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            # The imported name may be a module, or a name in one.
            found = name if name in modules else name.rpartition(".")[0]
            if found in modules:
                yield found


def find_circle(imports: Mapping[str, Set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as circle:
        return list(circle.args[1])
    return []


def test_nothing_imports_itself() -> None:
    assert find_circle(read_imports()) == []


def by_room(imports: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """Returns by folder those that its modules import. A module that is in the package's
    own folder counts as a room."""
    folders = {name.rpartition(".")[0] for name in imports}
    room_of = {name: name if name in folders or name.count(".") == 1 else name.rpartition(".")[0] for name in imports}
    rooms: dict[str, set[str]] = {room: set() for room in room_of.values()}
    for name, found in imports.items():
        rooms[room_of[name]] |= {room_of[one] for one in found if one in room_of} - {room_of[name]}
    return rooms


def test_no_room_imports_itself() -> None:
    imports = read_imports()
    # The package's face and its command line are above all rooms.
    imports = {name: found for name, found in imports.items() if name not in ("kvoffload", "kvoffload.__main__")}
    assert find_circle(by_room(imports)) == []


def test_a_planted_circle_of_rooms_is_found() -> None:
    imports = {
        "kvoffload.a.low": set(),
        "kvoffload.a.b.low": set(),
        "kvoffload.a.b.high": {"kvoffload.a.low"},
        "kvoffload.a.top": {"kvoffload.a.b.low"},
    }
    assert set(find_circle(by_room(imports))) == {"kvoffload.a", "kvoffload.a.b"}


@pytest.mark.parametrize("planted", ["from kvoffload.b import it", "def late():\n    import kvoffload.b"])
def test_a_planted_circle_is_found(planted: str) -> None:
    modules = {"kvoffload.a": 0, "kvoffload.b": 0}
    imports = {"kvoffload.a": set(find_imports(planted, modules)), "kvoffload.b": {"kvoffload.a"}}
    assert set(find_circle(imports)) == set(modules)
