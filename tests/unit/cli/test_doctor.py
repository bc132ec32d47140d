"""`kvoffload doctor` as a user meets it: lines, remedies, exit codes."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

from kvoffload.cli.doctor import FAILED
from tests.kit.cli.commands import run
from tests.kit.server.tiers import await_that, serving

VERDICTS = ("ok", "warn", "fail")


def rows_of(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = run("doctor", "--json", *arguments)
    assert done.stderr == ""
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, {row["check"]: row for row in rows}


def test_every_line_has_a_verdict_and_what_is_not_well_a_remedy(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        code, rows = rows_of("--set", f"server={tmp_path / 's'}", "--set", "memory=64MiB")
    assert {row["verdict"] for row in rows.values()} <= set(VERDICTS)
    assert all(bool(row["remedy"]) == (row["verdict"] != "ok") for row in rows.values())
    assert rows["server"]["verdict"] == rows["memory"]["verdict"] == rows["vLLM plugin"]["verdict"] == "ok"
    assert code == (FAILED if "fail" in {row["verdict"] for row in rows.values()} else 0)


def test_what_fails_is_said_and_makes_the_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    settings = [f"server={tmp_path / 's'}", "memory=900TiB", f"disk={folder}", "disk_size=1GiB"]
    settings.append("listen=tcp://127.0.0.1:5555")
    code, rows = rows_of(*(word for one in settings for word in ("--set", one)))
    assert code == FAILED
    for check in ("memory", f"disk {folder}", "keys", "server"):
        assert rows[check]["verdict"] == "fail"
    assert rows[f"disk {folder}"]["remedy"] == f"install -d -m 0700 {folder}"
    disk = f"--set disk={folder} --set disk_size=1GiB --set listen=tcp://127.0.0.1:5555"
    assert rows["server"]["remedy"] == f"kvoffload serve --set memory=900TiB {disk} --set server={tmp_path}/s"
    assert rows["memory"]["remedy"].startswith(f"kvoffload serve --set server={tmp_path}/s {disk} --set memory=")


def test_a_long_name_is_told_apart_from_what_is_said_of_it(tmp_path: Path) -> None:
    done = run("doctor", "--set", f"disk={tmp_path}/none", "--set", "disk_size=1GiB")
    assert f"fail  disk {tmp_path}/none  No such file or directory\n" in done.stdout


def test_sizes_have_three_digits_and_a_unit() -> None:
    sizes = re.findall(r"\b([0-9.]+)([KMGT]i)?B\b", run("doctor").stdout)
    assert len(sizes) > 2
    assert all(len(number.replace(".", "")) <= 3 or float(number) < 1024 for number, _ in sizes)


def test_settings_that_do_not_fit_each_other_are_a_finding(tmp_path: Path) -> None:
    code, rows = rows_of("--set", f"disk={tmp_path}")
    assert code == FAILED
    assert "disk_size" in rows["settings"]["text"]


def test_an_engine_that_may_not_load_us_is_told() -> None:
    done = run("doctor", "--vllm-plugins", "other")
    assert done.returncode == FAILED
    assert "export VLLM_PLUGINS=other,kvoffload" in done.stdout


def test_limits_of_this_process_are_what_is_judged() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    command = [sys.executable, "-m", "kvoffload", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == FAILED
    [line] = [line for line in done.stdout.splitlines() if line.startswith("fail  open files")]
    assert "64 (RLIMIT_NOFILE)" in line
    assert "ulimit -n " in done.stdout
    assert "\x1b" not in done.stdout, "colors are for terminals"


def test_a_command_that_starts_sglang_is_checked_if_it_is_given() -> None:
    _, rows = rows_of()
    assert "SGLang launch" not in rows
    code, rows = rows_of("--sglang", "python -m sglang.launch_server --device cpu --page-size 16")
    assert rows["SGLang launch"]["text"] == "it asks for no cache outside of SGLang"
    assert code == FAILED
