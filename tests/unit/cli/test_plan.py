"""`kvoffload plan` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.config.sources import load_settings
from tests.kit.cli.commands import run
from tests.kit.plan.configs import LLAMA_8B


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_a_table_for_people_and_settings_to_paste(model: Path, tmp_path: Path) -> None:
    done = run("plan", str(model), "--memory", "512GiB", "--disk", "4TiB", "--prefill", "8000")
    assert done.returncode == 0, done.stderr
    assert "A token takes 131,072 bytes." in done.stdout
    assert "4,194,304" in done.stdout, "tokens that memory holds"
    assert "unknown" not in done.stdout
    pasted = tmp_path / "server.toml"
    pasted.write_text(done.stdout.partition("To begin with:\n")[2])
    settings = load_settings(file=pasted).settings
    assert (settings.memory, settings.disk_size) == (512 << 30, 4 << 40)


def test_an_object_for_programs(model: Path) -> None:
    done = run("plan", str(model / "config.json"), "--memory", "1TiB", "--json", "--kv-dtype", "fp8")
    told = json.loads(done.stdout)
    assert told["token_bytes"] == 65_536
    [place] = told["places"]
    assert (place["name"], place["tokens"], place["break_even_tokens"]) == ("memory", (1 << 40) // 65_536, None)


def test_sglangs_pages_are_those_of_each_rank(model: Path) -> None:
    words = ("--engine", "sglang", "--page-size", "64", "--ranks", "2")
    shown = run("plan", str(model), *words)
    assert shown.returncode == 0, shown.stderr
    assert "bytes a record" in shown.stdout
    assert "4,194,304" in shown.stdout, "64 tokens of 131,072 bytes, on two ranks"
    [group] = json.loads(run("plan", str(model), *words, "--json").stdout)["groups"]
    assert (group["token_bytes"], group["record_bytes"]) == (131_072, 64 * 131_072 // 2)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--engine", "trt"], "--engine 'trt' is not known; allowed are vllm, sglang"),
        (["--page-size", "16"], "--page-size is SGLang's; add --engine sglang"),
        (["--engine", "sglang", "--exact"], "--exact asks vLLM"),
        (["--memory", "much"], "--memory 'much'"),
        (["--link", "25GB"], "--link '25GB' is no rate; give one such as 25GB/s"),
        (["--disk", "1TiB", "--disk-rate", "0B/s"], "--disk-rate '0B/s' is no rate"),
        (["--kv-dtype", "fp9"], "kv-dtype 'fp9' is not known"),
        (["--ranks", "3"], "cannot be shared by 3 ranks"),
    ],
)
def test_bad_words_are_one_line(model: Path, words: list[str], fault: str) -> None:
    done = run("plan", str(model), *words)
    assert done.returncode == 2
    assert fault in done.stderr
    assert done.stderr.count("\n") == 1
