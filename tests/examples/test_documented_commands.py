"""Every `kvoffload` command of the documents is run, and prints what they show, but for figures.

Places and names that stand for the reader's are the test's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvoffload.client.inspector import Inspector
from kvoffload.key_files import read_public_key, write_new_pair
from tests.house.commands import COMMANDS, OUTPUTS, WITHOUT_VALUE
from tests.kit.audit.caching_engine import CachingEngine, caching_engine
from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that, serving
from tests.kit.warm.played_engine import PlayedEngine, played_engine
from tests.kit.web.prompt_load import PromptLoad

GOES_ON = ("serve", "top", "web")
DEPENDS = {("doctor",): {0, 1}, ("bench", "copy"): {0, 1}}
"""Exit codes of what depends on the machine."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
"""The model of docs/sizing.md."""
EXACT = ("plan",)
"""Commands whose figures are the same everywhere."""
FIGURE = re.compile(r"\d[\d.,]*")
OWN = ("server=own", "memory=64MiB", "segment_size=64MiB")
TRACE = [{"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [at % 7, 8]} for at in range(50)]


class Reader:
    """A reader who types the commands, with a server that an engine uses, and engines that answer HTTP."""

    def __init__(self, socket: Path, load: PromptLoad, played: PlayedEngine, audited: CachingEngine) -> None:
        self._audited = audited
        self.environment = os.environ | {"KVOFFLOAD_SERVER": str(socket)}
        rows, _ = Inspector(load.client.look_into).find_blocks()
        self._words = {
            "server=/run/kvoffload.sock": f"server={socket}",
            "http=tcp://127.0.0.1:9470": "http=tcp://127.0.0.1:0",
            "http://127.0.0.1:8000": played.address,
            "http://127.0.0.1:9470": played.address,
            "ENGINE": load.engine,
            "3f9a": rows[0]["hash"][:4],
            "3f9a04c1": rows[0]["hash"],
        }

    def adapt(self, line: str) -> list[str]:
        """The words of a command, with what is the reader's own put in."""
        words = [word for word in shlex.split(line, comments=True)[1:] if word != WITHOUT_VALUE]
        if words[0] == "audit":
            return [self._audited.address if word.startswith("http://") else word for word in words]
        if words[0] != "serve":
            return [self._words.get(word, word) for word in words]
        # A server of its own, of a size that any machine has.
        adapted, rest = [], iter(words)
        for word in rest:
            value = next(rest) if word == "--set" else ""
            if value.startswith("listen="):
                value = f"listen=tcp://127.0.0.1:{free_port()}"
            if not value.startswith(("server=", "memory=")):
                adapted += [word, value] if value else [word]
        return [*adapted, *(part for one in OWN for part in ("--set", one))]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    with (
        serving(folder / "s") as server,
        played_engine(PlayedEngine()) as played,
        caching_engine(CachingEngine()) as audited,
    ):
        await_that(lambda: server.has_memory)
        load = PromptLoad(folder / "s")
        load.turn()
        assert load.client.stats().readable
        yield Reader(folder / "s", load, played, audited)
        load.close()


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with what a reader has: a model, a trace, prompts, keys, a configuration."""
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL/config.json").write_text(json.dumps(MODEL))
    for name in ("FILE", "trace.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n' * 3)
    (tmp_path / "TOKEN").write_text("secret")
    (tmp_path / "TOKEN").chmod(0o600)
    keys = {name: read_public_key(write_new_pair(tmp_path / name)[1]) for name in ("server", "dashboard")}
    (tmp_path / "server.toml").write_text(f'[[clients]]\nname = "dashboard"\nkey = "{keys["dashboard"]}"\n')
    return tmp_path


def run_until_told(command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Something that goes on, until it has said something; Ctrl-C ends it well."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, fault = process.communicate(timeout=60)
            assert (bool(said.strip()), process.returncode) == (True, 0), (said, fault)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "line", [line for _, line in COMMANDS], ids=[f"{file.name}: {line[:60]}" for file, line in COMMANDS]
)
def test_it_runs(reader: Reader, desk: Path, line: str) -> None:
    words = reader.adapt(line)
    if words[:2] == ["keys", "new"] or "--record" in words:
        # The file that the command makes must not exist yet.
        name = words[-1] if words[0] == "keys" else words[words.index("--record") + 1]
        for file in desk.glob(f"{Path(name).stem}*"):
            file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvoffload", *words]
    if words[0] in GOES_ON:
        run_until_told(command, desk, reader.environment)
        return
    done = subprocess.run(
        command, cwd=desk, env=reader.environment, capture_output=True, text=True, check=False, timeout=300
    )
    wanted = DEPENDS.get(tuple(words[:2]), DEPENDS.get(tuple(words[:1]), {0}))
    assert done.returncode in wanted, done.stdout + done.stderr
    assert done.stdout or len(done.stderr.splitlines()) == 1, "what cannot be done here is said in a line"
    if line in OUTPUTS:
        has_figures = words[0] in EXACT
        assert read_lines(done.stdout, has_figures=has_figures) == read_lines(OUTPUTS[line], has_figures=has_figures)


def read_lines(text: str, *, has_figures: bool) -> list[str]:
    return [line.rstrip() for line in (text if has_figures else FIGURE.sub("N", text)).splitlines()]


def test_outputs_are_shown() -> None:
    assert {line.split()[1] for line in OUTPUTS} == {"plan", "warm"}
