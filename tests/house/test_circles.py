"""No module imports itself by way of others, not even for its types: of two files one can be read without the other."""

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
            # What is imported from a module may be a name in it.
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


@pytest.mark.parametrize("planted", ["from kvoffload.b import it", "def late():\n    import kvoffload.b"])
def test_a_planted_circle_is_found(planted: str) -> None:
    modules = {"kvoffload.a": 0, "kvoffload.b": 0}
    imports = {"kvoffload.a": set(find_imports(planted, modules)), "kvoffload.b": {"kvoffload.a"}}
    assert set(find_circle(imports)) == set(modules)
