"""What our plugin and connector said in each process of an engine, and what was true there when they said it.

vLLM applies its logging configuration in every process it starts, also in those that no call of a test can reach. Our
handler travels in that configuration.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One log record of our plugin."""

    pid: int
    level: str
    message: str
    loaded_modules: list[str]  # of kvoffload, at that moment
    connector: str  # what our name meant to that process's factory, "" for nothing


class PluginLog(logging.Handler):
    """Appends a PluginReport to a file for each record; several processes may share the file."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.DEBUG)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        report = {
            "pid": os.getpid(),
            "level": record.levelname,
            "message": record.getMessage(),
            "loaded_modules": sorted(name for name in sys.modules if name.partition(".")[0] == "kvoffload"),
            "connector": resolve_connector(),
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")


@dataclass(frozen=True, slots=True)
class ConnectorRecord:
    """A warning or error of kvoffload, in whichever process. A fault that became a miss is an error."""

    pid: int
    level: str
    logger: str
    message: str


class ConnectorLog(logging.Handler):
    """Appends a ConnectorRecord to a file for each record; several processes may share the file."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.WARNING)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        entry = ConnectorRecord(os.getpid(), record.levelname, record.name, record.getMessage())
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")


def resolve_connector(_worker: Any = None) -> str:
    """What this process's factory makes of our name. Takes a worker so that `Engine.ask_workers` can run it there."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        found = KVConnectorFactory.get_connector_class_by_name("KVOffloadConnector")
    except ValueError:  # unknown name
        return ""
    return f"{found.__module__}.{found.__qualname__}"


def configure_logging(path: Path, *, plugin_log: Path, connector_log: Path) -> None:
    """Sends vLLM's warnings to stderr and our records to the two logs, here and, by the file at `path` for
    VLLM_LOGGING_CONFIG_PATH, in the processes of engines.

    The front-end's own turn comes too late: it loads plugins before it configures logging.
    """
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(process)d %(levelname)s %(name)s:%(lineno)d %(message)s"}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "line"},
            "plugin": {"()": f"{PluginLog.__module__}.{PluginLog.__name__}", "path": str(plugin_log)},
            "connector": {"()": f"{ConnectorLog.__module__}.{ConnectorLog.__name__}", "path": str(connector_log)},
        },
        "loggers": {
            "vllm": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            "kvoffload": {"handlers": ["connector"], "level": "INFO"},
            "kvoffload.connector.plugin": {"handlers": ["plugin"], "level": "DEBUG"},
        },
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    logging.config.dictConfig(config)


def read_plugin_log(path: Path) -> list[PluginReport]:
    """All reports so far, oldest first."""
    return [PluginReport(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_connector_log(path: Path) -> list[ConnectorRecord]:
    """All records so far, oldest first; none if nothing was said. A test compares with what was there before it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [ConnectorRecord(**json.loads(line)) for line in lines]
