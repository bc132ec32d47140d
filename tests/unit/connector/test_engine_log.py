"""Our lines in an engine's log: by vLLM's handlers and level, and by what its configuration file says of us."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent

import pytest

pytest.importorskip("vllm")

LINE = "ours: %(levelname)s %(name)s %(message)s"


SCRIPT = """
    import json, logging, os, sys
    from kvoffload.connector.engine_log import join_engine_log
    early = logging.getLogger("kvoffload.early")
    early.isEnabledFor(logging.INFO)
    join_engine_log()
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    for file, level in json.loads(sys.argv[1]):
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            print("end", flush=True)
            continue
        configure_logging(LoggingConfig(log_level=level, pylogging_config_file=file))
        join_engine_log()
        for name in ("kvoffload.early", "kvoffload.client.link"):
            for one in (logging.DEBUG, logging.INFO, logging.WARNING):
                logging.getLogger(name).log(one, "said")
        sys.stdout.flush()
        os._exit(0)
"""


def config_of(name: str) -> dict[str, object]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": LINE}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stdout"}},
        "loggers": {name: {"handlers": ["out"], "level": "WARNING", "propagate": False}},
    }


CASES: dict[str, tuple[dict[str, object] | None, str]] = {
    "default": (None, "INFO"),
    "debug": (None, "DEBUG"),
    "error": (None, "ERROR"),
    "vllm": (config_of("vllm"), "INFO"),
    "kvoffload": (config_of("kvoffload"), "INFO"),
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that a process of vLLM prints when our loggers log, before and after it configures its own.

    One imports vLLM, which takes seconds, and becomes a process for each case."""
    folder = tmp_path_factory.mktemp("logging")
    wanted = []
    for name, (config, level) in CASES.items():
        (folder / name).write_text(json.dumps(config))
        wanted.append((str(folder / name) if config else None, level))
    command = [sys.executable, "-c", dedent(SCRIPT), json.dumps(wanted)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told: list[list[str]] = [[]]
    for line in done.stdout.splitlines():
        if line == "end":
            told.append([])
        elif "said" in line:
            told[-1].append(line)
    return dict(zip(CASES, told[:-1], strict=True))


def test_by_default_each_line_comes_once_in_vllms_form(logged: dict[str, list[str]]) -> None:
    lines = logged["default"]
    assert [line.split()[2] for line in lines] == ["INFO", "WARNING", "INFO", "WARNING"]
    assert all(line.startswith("(MainProcess pid=") for line in lines)


def test_vllms_level_is_ours(logged: dict[str, list[str]]) -> None:
    assert len(logged["debug"]) == 6
    assert len(logged["error"]) == 0


@pytest.mark.parametrize("name", ["vllm", "kvoffload"])
def test_a_configuration_file_says_where_our_lines_go(logged: dict[str, list[str]], name: str) -> None:
    assert logged[name] == [
        "ours: WARNING kvoffload.early said",
        "ours: WARNING kvoffload.client.link said",
    ]
