"""The entry point against stand-ins for vLLM: every version, a stranger with our name, a factory that moved, its cost.

That real vLLM runs it is shown in tests/vllm/test_plugin.py.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvoffload.connector.plugin
from kvoffload.errors import CacheMemoryError, ConfigError


class StandInFactory:
    """vLLM's connector factory as far as registering goes."""

    def __init__(self, *taken: str) -> None:
        self.names: dict[str, tuple[str, str]] = {name: ("stranger", name) for name in taken}

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.names:
            raise ValueError(f"{name} exists")
        self.names[name] = (module_path, class_name)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """It has not registered anything yet."""
    name = kvoffload.connector.plugin.__name__
    monkeypatch.setattr(kvoffload.connector, "plugin", kvoffload.connector.plugin)
    monkeypatch.delitem(sys.modules, name)
    return importlib.import_module(name)


@pytest.fixture
def install_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in in vllm's place, of any version."""
    monkeypatch.setattr(logging.getLogger("kvoffload"), "parent", logging.getLogger())

    def install(factory: StandInFactory | None, version: tuple[int | str, ...] = (0, 32, 0)) -> None:
        home = "vllm.distributed.kv_transfer.kv_connector.factory"
        for package in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", home.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        names = {"__version__": ".".join(map(str, version)), "__version_tuple__": version}
        monkeypatch.setitem(sys.modules, "vllm.version", SimpleNamespace(**names))  # type: ignore[arg-type]
        module = SimpleNamespace(KVConnectorFactory=factory) if factory else None  # None makes the import fail
        monkeypatch.setitem(sys.modules, home, module)  # type: ignore[arg-type]

    return install


def test_repeated_calls_register_once_and_import_nothing(
    plugin: Any, install_vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=plugin.logger.name)
    install_vllm(factory := StandInFactory())
    before = set(sys.modules)
    plugin.register()
    plugin.register()
    assert factory.names == {"KVOffloadConnector": ("kvoffload.connector.facade", "KVOffloadConnector")}
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "KVOffloadConnector registered with vLLM 0.32.0")
    ]
    assert set(sys.modules) == before


def test_foreign_registration_stays_with_one_warning(
    plugin: Any, install_vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install_vllm(factory := StandInFactory("KVOffloadConnector"))
    plugin.register()
    plugin.register()
    assert factory.names["KVOffloadConnector"][0] == "stranger"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_vllm_below_the_floor_gets_one_line_with_both_versions(
    plugin: Any, install_vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install_vllm(factory := StandInFactory(), version=(0, 30, 2))
    plugin.register()
    plugin.register()
    assert factory.names == {}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "0.31" in record.getMessage()
    assert "0.30.2" in record.getMessage()


@pytest.mark.parametrize("version", [(0, 31, 0), (0, 33, 1, "dev7"), (1, 0), (0, 0, "dev")])
def test_vllm_at_the_floor_newer_or_unversioned_is_accepted(
    plugin: Any, install_vllm: Any, version: tuple[int | str, ...]
) -> None:
    install_vllm(factory := StandInFactory(), version=version)
    plugin.register()
    assert "KVOffloadConnector" in factory.names


class Looking(StandInFactory):
    """A factory that gives the class that a configuration names."""

    def get_connector_class(self, kv_transfer_config: Any) -> str:
        return f"class of {kv_transfer_config.kv_connector}"


def transfer(name: str, **settings: object) -> Any:
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=settings)


def test_a_wrong_setting_is_refused_where_vllm_looks_for_the_class(
    plugin: Any, install_vllm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    install_vllm(factory := Looking())
    plugin.register()
    plugin.register()
    assert factory.get_connector_class(transfer("KVOffloadConnector", memory="1GiB")) == "class of KVOffloadConnector"
    assert factory.get_connector_class(transfer("Another", memori="1GiB")) == "class of Another"
    with pytest.raises(ConfigError, match=r"'memori'.*did you mean 'memory'") as refusal:
        factory.get_connector_class(transfer("KVOffloadConnector", memori="1GiB"))
    sys.excepthook(refusal.type, refusal.value, refusal.tb)
    assert capsys.readouterr().err == f"kvoffload: {refusal.value}\n"


def test_memory_that_there_is_not_is_refused_before_there_are_weights(
    plugin: Any, install_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    install_vllm(factory := Looking())
    plugin.register()
    with pytest.raises(CacheMemoryError, match=r"512TiB of memory are wanted.*; set `memory` to less"):
        factory.get_connector_class(transfer("KVOffloadConnector", memory="512TiB"))
    # A shared server has a pool of its own.
    shared = transfer("KVOffloadConnector", memory="512TiB", server="/run/kvoffload.sock")
    assert factory.get_connector_class(shared) == "class of KVOffloadConnector"


def test_factory_that_moved_is_a_warning(plugin: Any, install_vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    install_vllm(None)
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_module_import_brings_no_other_module_of_kvoffload() -> None:
    """The modules of others that it may import are in tests/house/test_light_imports.py."""
    script = "import json, sys, kvoffload.connector.plugin; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    ours = [name for name in json.loads(printed.stdout) if name.startswith("kvoffload")]
    own = ["kvoffload.connector.engine_log", "kvoffload.connector.plugin"]
    assert ours == ["kvoffload", "kvoffload.connector", *own]
