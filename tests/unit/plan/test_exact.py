"""vLLM's own answer: what is made of it, and of none. tests/vllm asks the real one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.plan import exact
from kvoffload.plan.exact import ask_vllm, write_config
from kvoffload.plan.model_shape import Keeps, LayerShape, ShapeSettings
from tests.kit.plan.configs import LLAMA_8B

ATTENTION = {"keeps": "TOKENS", "what": "attention", "token_bytes": 4096, "heads": 8}
WINDOW = {"keeps": "WINDOW", "what": "sliding window", "token_bytes": 4096, "heads": 8, "tokens": 1024}
STATE = {"keeps": "STATE", "what": "mamba2", "state_bytes": 77}


def answer(monkeypatch: pytest.MonkeyPatch, stdout: str, *, stderr: str = "") -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", run)


def ask(ranks: int = 1) -> Any:
    return ask_vllm(LLAMA_8B, ShapeSettings(ranks=ranks)).layers


def test_the_last_line_has_a_row_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, f"what vLLM says\n{json.dumps([ATTENTION, WINDOW, STATE])}\n")
    assert ask() == [
        LayerShape(keeps=Keeps.TOKENS, what="attention", token_bytes=4096),
        LayerShape(keeps=Keeps.WINDOW, what="sliding window", token_bytes=4096, tokens=1024),
        LayerShape(keeps=Keeps.STATE, what="mamba2", state_bytes=77),
    ]


def test_what_ranks_hold_alike_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, json.dumps([ATTENTION]))
    assert [ask(ranks)[0].token_bytes for ranks in (1, 8, 16)] == [4096, 4096, 4096]
    assert [ask(ranks)[0].copies for ranks in (1, 8, 16)] == [1, 1, 2]
    with pytest.raises(ConfigError, match="8 heads cannot be shared by 3 ranks"):
        ask(3)


def test_states_are_told_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, json.dumps([STATE]))
    with pytest.raises(ConfigError, match="states of one rank alone; leave --ranks out"):
        ask(2)


@pytest.mark.parametrize(
    ("stdout", "stderr", "said"),
    [
        (
            json.dumps({"fault": "ValueError: no such model"}),
            "",
            "does not take this config: ValueError: no such model",
        ),
        ("half a li", "a trace\nKilled\n", "does not take this config: Killed"),
        ("", "", "does not take this config: exit code 0"),
        ("3", "", "does not take this config: exit code 0"),
    ],
)
def test_what_is_no_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str, said: str) -> None:
    answer(monkeypatch, stdout, stderr=stderr)
    with pytest.raises(ConfigError, match=said) as found:
        ask()
    assert "\n" not in str(found.value)


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="vLLM said nothing within 300 s; run it without --exact"):
        ask()


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="not installed here; run it in vLLM's Python"):
        ask()


def test_what_only_a_tokenizer_completes_is_not_shown_to_vllm(tmp_path: Path) -> None:
    tables = {"engram_layer_ids": [1, 14], "num_hidden_layers": 40}
    write_config(tmp_path, {**tables, "text_config": tables})
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {"num_hidden_layers": 40, "text_config": {"num_hidden_layers": 40}}
