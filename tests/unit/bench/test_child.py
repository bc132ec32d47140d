"""Children do what they are told, and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.bench.child import Child
from kvoffload.errors import BenchmarkError

MODULE = "tests.kit.bench.adding_child"
ROOT = str(Path(__file__).parents[3])


@pytest.fixture(autouse=True)
def _is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT, prepend=":")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_child_answers_in_order_and_ends() -> None:
    with Child(MODULE, 5) as child:
        child.start("add", 1)
        child.start("add", 2)
        assert (child.answer(), child.answer(), child.ask("add", 10)) == (6, 7, 15)
    assert is_gone(child.pid)


def test_a_child_that_dies_is_a_fault() -> None:
    with Child(MODULE, 5) as child, pytest.raises(BenchmarkError, match="adding_child ended"):
        child.ask("die")
    assert is_gone(child.pid)


def test_a_child_that_never_was_ready_is_a_fault() -> None:
    with pytest.raises(BenchmarkError, match="adding_child ended"):
        Child(MODULE, "five")


def test_a_killed_child_is_gone() -> None:
    child = Child(MODULE, 5)
    child.kill()
    assert is_gone(child.pid)
