"""Fixtures for every test of the real SGLang engine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sglang") and find_spec("sglang") is None:
        pytest.skip("sglang is not installed (`make sglang` has an environment of its own for it)")
