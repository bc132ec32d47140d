"""Every block of the pages is run as it stands, or else read by what would read it: no page shows what does not work.

`kvoffload` commands and their outputs are run by test_documented_commands.py, requests of curl and their answers by
test_documented_requests.py. Here is the rest, and a list of commands that cannot run in a test.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cache import Ask, Publication
from kvoffload.cache.segment_map import SegmentMap
from kvoffload.client import Client, ClientSettings
from kvoffload.config.sources import load_settings
from kvoffload.connector.common.envelope import read_envelope
from kvoffload.connector.common.receipt import Receipt
from kvoffload.connector.common.request_settings import read_settings
from kvoffload.key_files import read_public_key, write_new_pair
from kvoffload.server.config import read_server_config
from kvoffload.warm.prompt_file import WarmPrompt, read_prompts
from tests.house.commands import BLOCKS, SPANS, STATEMENTS, Block, find_program
from tests.house.tree import ROOT

NOT_RUN = {
    "make demo": "it sets everything up; tests/vllm/test_newcomer.py runs it without that",
    "make test": "it runs this test",
    "make wheels": "minutes of compiling; make campaign makes a release of these wheels",
    "pip install .": "it compiles; tests/house/test_wheel.py does it in the campaign",
    "sha256sum --check": "it needs a release; tests/house/test_release.py does it in the campaign",
    "pip download": "likewise",
    "pip install chosen": "likewise",
    "docker compose": "it needs Docker and a GPU; tests/examples/test_compose.py reads its file",
    "helm install": "it needs a cluster; here the chart is rendered with these values",
    "prometheus": "it goes on; tests/examples/test_monitoring.py checks its file and runs it on a port of its own",
    "vllm serve": "it needs a model; here its settings are read, and tests/vllm/test_plugin.py has vLLM parse it",
    "SGLANG_USE_CPU_ENGINE=1 python -m sglang.launch_server": "it needs a model; tests/sglang/test_http.py runs it",
    "python examples/10_sglang_and_vllm/run.py": "it needs both engines; tests/sglang/test_example.py runs it",
    "python examples/08_prefill_and_decode/proxy.py": "it goes on; tests/examples/test_prefill_and_decode.py runs it",
}
"""Beginnings of commands, and why no test runs them as they stand."""
RUN = {"kvoffload": "test_documented_commands.py", "curl": "test_documented_requests.py"}
"""Programs whose commands other tests run."""
OWN_CONNECTOR, VLLMS_CONNECTOR = "KVOffloadConnector", "OffloadingConnector"
OF_VLLMS_TIER = {"type", "module_path", "backpressure", "locality"}
"""Fields of a secondary tier that are vLLM's own."""
_FILES = re.compile(r"(?<![\w/])(?:tests|examples|benchmarks)/[\w/.:]+")
OTHER_SPANS = {
    '"server": "/run/kvoffload/server"',
    '"kv_connector_module_path": "kvoffload.connector.facade"',
    '"kv_role": "kv_producer"',
    '{"ignored": "unknown_action"}',
    '{"tenant": "a", "quota_bytes": 1073741824}',
    '"hit_tokens": null',
    '{"prompts": [{"identities": [...]}, ...]}',
    '{"error": "..."}',
    "disk=%S/kvoffload",
}


def of_program(*names: str) -> list[str]:
    return [statement for _, statement in STATEMENTS if find_program(statement) in names]


def of_language(name: str) -> Any:
    blocks = [block for block in BLOCKS if block.language == name]
    return pytest.mark.parametrize("block", blocks, ids=map(str, blocks))


def begins_with(statement: str) -> list[str]:
    return [beginning for beginning in NOT_RUN if statement.startswith(beginning)]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    tested = {"toml", "python", "json"}
    for block in BLOCKS:
        kinds = [block.is_shell, block.is_json, block.is_drawing, block.is_output, block.language in tested - {"json"}]
        assert sum(kinds) == 1, block


def test_every_command_is_run_or_listed() -> None:
    ran_here = set(RUN_HERE)
    for page, statement in STATEMENTS:
        ways = [find_program(statement) in RUN, statement in ran_here, len(begins_with(statement)) == 1]
        assert sum(ways) == 1, f"{page}: {statement}"
    assert all(any(statement.startswith(one) for _, statement in STATEMENTS) for one in NOT_RUN)


def test_what_the_list_names_exists() -> None:
    named = [path for why in NOT_RUN.values() for path in re.findall(r"tests/[\w/]+\.py", why)]
    assert len(named) > 8
    assert all((ROOT / path).is_file() for path in (*named, *(f"tests/examples/{name}" for name in RUN.values())))


# ---- commands ----

RUN_HERE = [statement for statement in of_program("python") if not begins_with(statement)]


@pytest.mark.parametrize("statement", RUN_HERE)
def test_a_python_command_runs(statement: str) -> None:
    words = [sys.executable, *shlex.split(statement, comments=True)[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("statement", [one for one in of_program("python") if "examples/" in one])
def test_an_example_has_the_options_of_its_command(statement: str) -> None:
    script, *words = shlex.split(statement, comments=True)[1:]
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert [word for word in words if word.startswith("--") and word not in done.stdout] == []


def test_make_has_every_goal() -> None:
    goals = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    lines = [*of_program("make"), *(span for _, span in SPANS if span.startswith("make "))]
    for line in lines:
        words = line.partition("#")[0].split()[1:]
        assert {word for word in words if "=" not in word} <= goals, line


def test_modules_and_files_of_commands_in_sentences_exist() -> None:
    found = 0
    for page, span in SPANS:
        module = re.match(r"python -m ((?:benchmarks|tests|docs)[\w.]*)", span)
        files = [Path(one.partition("::")[0]) for one in _FILES.findall(span)]
        if module and "NAME" not in module[1]:
            files.append(Path(*module[1].split(".")))
        found += len(files)
        for file in files:
            there = [file, file.with_suffix(".py")] if span.startswith("python -m") else [file]
            assert any((ROOT / one).exists() for one in there), f"{page}: {span}"
    assert found > 50


def test_helm_takes_the_values() -> None:
    helm = pytest.importorskip("helm_python", reason="Helm (helm-python-sdk) could not be had by make setup")
    [line] = of_program("helm")
    _, command, name, folder, *options = shlex.split(line)
    assert (command, options[::2]) == ("install", ["--set"] * (len(options) // 2))
    with helm.Chart.load(ROOT / folder) as chart:
        made = chart.render(helm.parse_set_string(",".join(options[1::2])), name=name, namespace="default")
    server = next(text for text in made.values() if "kind: DaemonSet" in text)
    assert "memory=256GiB" in server
    assert re.search(r"gpu: \"?yes", server)


def test_files_that_commands_name_are_there() -> None:
    named = [word for one in of_program("docker", "prometheus") for word in re.findall(r"examples/[\w/.]+", one)]
    assert len(named) == 2
    assert all((ROOT / file).is_file() for file in named)


@pytest.mark.parametrize("line", of_program("vllm"))
def test_an_engine_takes_the_settings(line: str) -> None:
    words = shlex.split(line)
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] in (OWN_CONNECTOR, VLLMS_CONNECTOR)
    settings = transfer.get("kv_connector_extra_config", {})
    if transfer["kv_connector"] == VLLMS_CONNECTOR:
        [tier] = settings["secondary_tiers"]
        assert (tier["type"], tier["module_path"]) == ("KVOffloadTier", "kvoffload.connector.secondary_tier")
        settings = {name: value for name, value in tier.items() if name not in OF_VLLMS_TIER}
    load_settings(engine=settings, environment={"XDG_RUNTIME_DIR": "/run/user/0"})


# ---- settings, requests and answers ----


@of_language("toml")
def test_a_configuration_is_read(block: Block, tmp_path: Path) -> None:
    key = read_public_key(write_new_pair(tmp_path / "server")[1])
    text = re.sub("<(its )?public key>", lambda _: key, block.text).replace('"alice"', '"root"')
    file = tmp_path / "server.toml"
    file.write_text(text)
    load_settings(file=file, environment={})
    tables = {name: value for name, value in tomllib.loads(text).items() if isinstance(value, dict | list)}
    config = read_server_config(tables, origin="the page")
    assert len(config.make_guests()) == len(tables.get("clients", ())) + len(tables.get("peers", ()))
    assert len(config.domains) == len(tables.get("domains", ()))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_json], ids=str)
def test_json_is_what_the_code_reads_or_writes(block: Block) -> None:
    text = block.text.replace("[...]", "[]")
    if text.startswith('{"messages"'):
        prompts = list(read_prompts(io.BytesIO(text.encode())))
        assert len(prompts) == text.count("\n")
        assert all(isinstance(one, WarmPrompt) for one in prompts)
        return
    read = json.loads(text)
    match next(iter(read)):
        case "model" | "session":
            check_wishes(read.get("kv_transfer_params", read))
        case "kvoffload_receipt":
            receipt = read["kvoffload_receipt"]
            engine, computed = receipt["tokens"].pop("engine"), receipt["tokens"].pop("computed")
            made = Receipt(
                engine_tokens=engine,
                computed_tokens=computed,
                sources=tuple(receipt["tokens"].items()),
                saved_s=receipt["saved_s"],
                loaded_bytes=receipt["loaded_bytes"],
            )
            assert made.describe() == json.loads(text)["kvoffload_receipt"]
        case first:
            # Answers, which test_documented_requests.py compares.
            assert first in ("identities", "message_id")


def check_wishes(params: dict[str, Any]) -> None:
    """A request's wishes for the cache are such as the connector grants."""
    wishes, complaint = read_settings(params)
    envelope = read_envelope(params.get("kv_hints"))
    assert (complaint, envelope.complaint, envelope.ignored) == ("", "", ())
    assert wishes.session
    assert all(name == "kv_hints" or getattr(wishes, name) == value for name, value in params.items())


def find_pairs(span: str) -> dict[str, Any] | None:
    """The names and values that a piece of code gives; None: it gives none."""
    if re.fullmatch(r"[a-z_]+=[\w.%/]+", span):
        name, _, value = span.partition("=")
        return {name: value}
    if re.match(r'\{?"\w+": ', span):
        read: dict[str, Any] = json.loads(span if span.startswith("{") else f"{{{span}}}")
        return read
    return None


def test_settings_in_sentences_are_taken() -> None:
    known = set(load_settings(environment={}).settings.model_dump())
    found = 0
    for page, span in SPANS:
        pairs = None if span in OTHER_SPANS else find_pairs(span)
        if pairs is None:
            continue
        if set(pairs) <= known:
            load_settings(engine=pairs, environment={"XDG_RUNTIME_DIR": "/run/user/0"})
            found += 1
        elif ":" in span:
            wishes, complaint = read_settings(pairs)
            assert all(getattr(wishes, name, None) == value for name, value in pairs.items()), f"{page}: {span}"
            assert complaint == ""
    assert found > 8


# ---- programs ----


@of_language("python")
def test_a_program_calls_what_there_is(block: Block) -> None:
    """Calls of our classes have the arguments that these take, and attributes exist."""
    classes = {"client": Client, "Client": Client, "ClientSettings": ClientSettings, "Ask": Ask}
    classes |= {"Publication": Publication, "pointers": SegmentMap.pointers}
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    assert calls
    for call in calls:
        match call.func:
            case ast.Name(id=name) if name in classes:
                called = classes[name]
                arguments = [*call.args]
            case ast.Attribute(value=ast.Name(id="client"), attr=name):
                called = getattr(Client, name)
                arguments = [None, *call.args]
            case _:
                continue
        inspect.signature(called).bind(*arguments, **{str(one.arg): one.value for one in call.keywords})
