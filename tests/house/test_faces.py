"""Tests use public faces. Where there is none, a comment says why: `# private: what vLLM calls itself`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.tree import read_texts

MOST = 36
"""Lines that reach for what is private, each with its reason."""
REASON = re.compile(r"# private: \w")
DOCUMENTED = frozenset(("_asdict", "_current_frames", "_exit", "_fields", "_make", "_replace"))
"""Python's own, which its documentation has."""
BY_NAME = frozenset(("delattr", "getattr", "hasattr", "methodcaller", "attrgetter", "object", "patch", "setattr"))
"""Calls that take an attribute's name; `object` is that of `patch.object`."""


def find_private(source: str) -> Iterator[tuple[int, str]]:
    """Yields the lines that name a private attribute of another object, and its name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield node.end_lineno or node.lineno, name
            case ast.ImportFrom(module=module, names=names):
                yield from ((one.lineno, part) for one in names for part in f"{module}.{one.name}".split("."))
            case ast.Import(names=names):
                yield from ((one.lineno, part) for one in names for part in one.name.split("."))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args) if called in BY_NAME:
                for given in args:
                    if isinstance(given, ast.Constant) and isinstance(given.value, str):
                        yield given.lineno, given.value.rpartition(".")[2]


def is_private(name: str) -> bool:
    is_dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and name.strip("_") != "" and not is_dunder and name not in DOCUMENTED


def list_private(source: str) -> list[tuple[int, bool]]:
    """Each line that names something private, and whether it, or a comment before it, says why."""
    lines = ["", *source.splitlines()]
    found = sorted({line for line, name in find_private(source) if is_private(name)})
    return [(line, bool(REASON.search(lines[line]) or REASON.match(lines[line - 1].strip()))) for line in found]


def test_whatever_private_a_test_reaches_for_has_its_reason_and_is_rare() -> None:
    found = [
        (f"{file}:{line}", has_reason)
        for file, text in read_texts().items()
        if file.parts[0] == "tests" and file.suffix == ".py"
        for line, has_reason in list_private(text)
    ]
    assert [line for line, has_reason in found if not has_reason] == [], "ask a public face, or say `# private: why`"
    assert len(found) <= MOST


@pytest.mark.parametrize(
    "planted",
    [
        "assert thing._state == 3",
        "assert self.thing._state == 3",
        "thing.of(1)._state = 3",
        "from kvoffload.errors import _refuse",
        "from torch.utils import _python_dispatch",
        "import torch.utils._python_dispatch",
        'monkeypatch.setattr(thing, "_state", 3)',
        'getattr(thing, "_state")',
        'patch("kvoffload.errors._refuse")',
        'patch.object(thing, "_state", 3)',
    ],
)
def test_a_planted_one_is_found(planted: str) -> None:
    assert list_private(planted) == [(1, False)]
    assert list_private(f"{planted}  # private: it has no other face") == [(1, True)]
    assert list_private(f"# private: it has no other face\n{planted}") == [(2, True)]
    assert list_private(f"call()  # private: another line's\n{planted}") == [(2, False)]
    assert list_private(f"{planted}  # private:") == [(1, False)]


@pytest.mark.parametrize(
    "fine",
    [
        "self._state = 3",
        "assert thing.state == 3",
        "assert thing.__dict__ == {}",
        "os._exit(0)",
        "new = old._replace(size=3)",
        "from kvoffload.errors import refuse",
        'monkeypatch.setattr(thing, "state", 3)',
        "for _ in range(3): pass",
        "# thing._state",
    ],
)
def test_what_is_public_is_not(fine: str) -> None:
    assert list_private(fine) == []
