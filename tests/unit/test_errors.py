"""The error tree."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvoffload import errors
from kvoffload.errors import ConfigError, HoleError, KVOffloadError, find_code, walk_errors


def test_every_error_has_a_code_of_its_own_and_a_sentence() -> None:
    kinds = list(walk_errors())
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all((kind.__doc__ or "").strip().endswith(".") for kind in kinds)


def test_a_code_starts_with_its_parents_code() -> None:
    for kind in walk_errors():
        parent = kind.__mro__[1]
        if issubclass(parent, KVOffloadError) and parent is not KVOffloadError:
            assert kind.code.startswith(parent.code + ".")


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = [line.split() for line in (errors.__doc__ or "").splitlines() if "Error " in line and "  " in line.strip()]
    assert [(words[-2], words[-1]) for words in drawn] == [(kind.__name__, kind.code) for kind in walk_errors()]


def raise_hole() -> None:
    raise HoleError("bytes 3 to 5 belong to nobody", remedy="declare them", allocation="kv", start=3)


def test_a_fault_that_is_not_ours_is_internal() -> None:
    assert find_code(ConfigError("a", remedy="b")) == "config"
    assert find_code(ZeroDivisionError()) == "internal"


def test_an_error_survives_the_way_to_another_process() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool, pytest.raises(HoleError) as caught:
        pool.submit(raise_hole).result()
    assert str(caught.value) == "bytes 3 to 5 belong to nobody; declare them"
    assert caught.value.context == {"allocation": "kv", "start": 3}
