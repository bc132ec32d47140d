"""The cache of this version is one that a server can serve."""

from __future__ import annotations

import inspect

import pytest

from kvoffload.cache import LocalCache
from kvoffload.server import ServedCache

VERBS = [name for name, member in vars(ServedCache).items() if inspect.isfunction(member) and name[0] != "_"]


@pytest.mark.parametrize("verb", VERBS)
def test_local_cache_takes_all_that_the_server_says(verb: str) -> None:
    asked = inspect.signature(getattr(ServedCache, verb)).parameters
    taken = inspect.signature(getattr(LocalCache, verb)).parameters
    assert asked.keys() <= taken.keys()
    assert all(taken[name].kind is parameter.kind for name, parameter in asked.items())
    extra = taken.keys() - asked.keys()
    assert all(taken[name].default is not inspect.Parameter.empty for name in extra)


def test_local_cache_has_the_properties_too() -> None:
    assert isinstance(inspect.getattr_static(LocalCache, "stats"), property)
    assert isinstance(inspect.getattr_static(LocalCache, "version"), property)
