"""Settings of the whole test run."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

# A check that fails in the kit says what it compared, as one in a test does.
pytest.register_assert_rewrite("tests.kit", "tests.vllm.equality")

# No deadline: a shared machine's pauses are not a property of the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("campaign", settings.get_profile("house"), max_examples=20_000)
settings.load_profile("house")


def pytest_collection_finish() -> None:
    """Keeps garbage collections from going through the objects imported so far: some tests cause many collections, and
    with an engine's packages in the process one takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Lets the end of the process collect the objects that were frozen."""
    gc.unfreeze()
