"""Our lines in an engine's log: by vLLM's handlers and level, and by what its configuration file says of us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("vllm")

LINE = "ours: %(levelname)s %(name)s %(message)s"


def logged(tmp_path: Path, config: dict[str, object] | None = None, *, level: str = "INFO") -> list[str]:
    """What a process of vLLM's prints when our loggers say something, before and after it configures its own."""
    file = tmp_path / "logging.json"
    file.write_text(json.dumps(config))
    script = f"""
        import logging
        from kvoffload.connector.engine_log import join_engine_log
        early = logging.getLogger("kvoffload.early")
        early.isEnabledFor(logging.INFO)
        join_engine_log()
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging
        configure_logging(LoggingConfig(log_level={level!r}, pylogging_config_file={str(file) if config else None!r}))
        join_engine_log()
        for name in ("kvoffload.early", "kvoffload.client.link"):
            for level in (logging.DEBUG, logging.INFO, logging.WARNING):
                logging.getLogger(name).log(level, "said")
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], check=True, capture_output=True, text=True)
    return [line for line in (done.stdout + done.stderr).splitlines() if "said" in line]


def test_by_default_each_line_comes_once_in_vllms_form(tmp_path: Path) -> None:
    lines = logged(tmp_path)
    assert [line.split()[2] for line in lines] == ["INFO", "WARNING", "INFO", "WARNING"]
    assert all(line.startswith("(MainProcess pid=") for line in lines)


def test_vllms_level_is_ours(tmp_path: Path) -> None:
    assert len(logged(tmp_path, level="DEBUG")) == 6
    assert len(logged(tmp_path, level="ERROR")) == 0


@pytest.mark.parametrize("name", ["vllm", "kvoffload"])
def test_a_configuration_file_says_where_our_lines_go(tmp_path: Path, name: str) -> None:
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": LINE}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stdout"}},
        "loggers": {name: {"handlers": ["out"], "level": "WARNING", "propagate": False}},
    }
    assert logged(tmp_path, config) == [
        "ours: WARNING kvoffload.early said",
        "ours: WARNING kvoffload.client.link said",
    ]
