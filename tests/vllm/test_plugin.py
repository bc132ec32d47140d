"""Our name in real vLLM: known in every process of an engine, harmless when told again, refused in one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import closing
from copy import copy
from importlib.metadata import entry_points
from typing import Any

import pytest

from kvoffload.connector import plugin
from kvoffload.connector.engine.kept_groups import SPECS
from kvoffload.errors import ConfigError
from tests.house.commands import STATEMENTS
from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.tiny_models import DENSE, GDN

pytestmark = pytest.mark.vllm

CONNECTOR = "kvoffload.connector.facade.KVOffloadConnector"
DOCUMENTED = sorted({statement for _, statement in STATEMENTS if statement.startswith("vllm ")})
LIGHT_MODULES = ["kvoffload", "kvoffload.connector", "kvoffload.connector.engine_log", "kvoffload.connector.plugin"]


def acquire_two_ranks(engines: EnginePool) -> Engine:
    return engines.acquire(GDN, has_own_processes=True, kv_transfer_config=probe.transfer(), **probe.TWO_RANKS)


def test_installed_package_declares_the_entry_point() -> None:
    (entry_point,) = (entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvoffload")
    assert entry_point.load() is plugin.register


def test_the_name_means_a_connector_for_hybrid_models() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name("KVOffloadConnector")
    assert probe.resolve_connector() == CONNECTOR
    assert issubclass(found, KVConnectorBase_V1)
    assert issubclass(found, SupportsHMA)


@pytest.mark.parametrize("line", DOCUMENTED)
def test_vllm_takes_the_commands_of_the_pages(line: str) -> None:
    from vllm.config import KVTransferConfig
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    given = parser.parse_args(shlex.split(line)[1:])
    transfer = given.kv_transfer_config
    if isinstance(transfer, dict):
        transfer = KVTransferConfig(**transfer)
    assert given.model_tag == "MODEL"
    assert transfer.kv_connector in ("KVOffloadConnector", "OffloadingConnector")


def register_again(worker: Any) -> str:
    plugin.register()
    plugin.register()
    return probe.resolve_connector(worker)


def test_every_process_of_an_engine_knows_the_name(engines: EnginePool) -> None:
    engine = acquire_two_ranks(engines)
    workers = engine.ask_workers(lambda _worker: os.getpid())
    (engine_core,) = set(engine.ask_workers(lambda _worker: os.getppid()))
    assert len({os.getpid(), engine_core, *workers}) == 4
    assert probe.resolve_connector() == CONNECTOR
    assert probe.ask_core(engine, "resolve_connector") == CONNECTOR
    assert engine.ask_workers(probe.resolve_connector) == [CONNECTOR, CONNECTOR]


def test_the_plugin_costs_a_process_that_does_not_use_it_few_modules() -> None:
    script = (
        "import json, sys, vllm.plugins; vllm.plugins.load_general_plugins();"
        "print(json.dumps(sorted(name for name in sys.modules if name.partition('.')[0] == 'kvoffload')))"
    )
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert json.loads(printed.stdout.splitlines()[-1]) == LIGHT_MODULES


def test_calling_again_does_no_harm_in_any_process(engines: EnginePool) -> None:
    engine = acquire_two_ranks(engines)
    assert engine.ask_workers(register_again) == [CONNECTOR, CONNECTOR]
    assert register_again(None) == CONNECTOR


def test_an_engine_finds_the_connector_by_its_module_path(engines: EnginePool) -> None:
    """For an environment whose entry points vLLM does not read (VLLM_PLUGINS)."""
    by_path = probe.transfer() | {"kv_connector_module_path": "kvoffload.connector.facade"}
    engine, prompt = engines.acquire(DENSE, kv_transfer_config=by_path), make_prompt(seed=1, length=300)
    assert f"{type(probe.scheduler_connector(engine)).__module__}.KVOffloadConnector" == CONNECTOR
    engine.generate(prompt)
    engine.reset_local()
    assert engine.generate(prompt).num_cached_tokens == 256


def construct(engine: Engine, *, transfer: dict[str, object], **parallel: int) -> list[Any]:
    """Makes the connectors that an engine with these settings makes at its start, one for each role."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    config = copy(engine.llm.llm_engine.vllm_config)
    config.kv_transfer_config = KVTransferConfig(**transfer)  # type: ignore[arg-type]
    config.parallel_config = copy(config.parallel_config)
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    cache = engine.core.scheduler.kv_cache_config
    return [KVConnectorFactory.create_connector(config, role, cache) for role in KVConnectorRole]


def test_an_engine_that_cannot_be_served_has_an_idle_connector_and_one_line_says_why(
    engines: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines.acquire(DENSE)
    for served in ({}, {"pipeline_parallel_size": 2}):
        for connector in construct(engine, transfer=probe.transfer(), **served):
            assert type(connector).__name__ == "KVOffloadConnector"
    for connector in construct(engine, transfer=probe.transfer(), prefill_context_parallel_size=2):
        assert type(connector).__name__ == "IdleConnector"
    (line,) = [record.message for record in caplog.records if "keeps nothing" in record.message]
    assert "prefill context parallel" in line
    assert "\n" not in line


def test_an_engine_with_an_unknown_kind_of_cache_computes_all_prompts_as_without_us(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later vLLM may bring a model whose cache we do not know. It must start, and give the same tokens."""
    prompt = make_prompt(seed=1, length=300)
    alone = engines.acquire(DENSE).generate(prompt)
    monkeypatch.delitem(SPECS, "FullAttentionSpec")
    engines.leave_process()
    with closing(start_engine(DENSE, engines.model_folder(DENSE), kv_transfer_config=probe.transfer())) as engine:
        assert type(engine.core.scheduler.connector).__name__ == "IdleConnector"
        for _ in range(2):
            engine.reset_local()
            found = engine.generate(prompt)
            assert found.outputs[0].token_ids == alone.outputs[0].token_ids
            assert found.num_cached_tokens == 0


@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_an_unknown_setting_is_refused_when_arguments_are_read(engines: EnginePool, is_one_of_several: bool) -> None:
    """Long before there are weights, or another process than the one that reads them."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig

    wrong = probe.transfer(memori="1GiB")
    if is_one_of_several:
        wrong = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [wrong]},
        }
    transfer = KVTransferConfig(**wrong)  # type: ignore[arg-type]
    arguments = EngineArgs(
        model=str(engines.model_folder(DENSE)), skip_tokenizer_init=True, kv_transfer_config=transfer
    )
    with pytest.raises(ConfigError, match="memori") as refusal:
        arguments.create_engine_config()
    assert "\n" not in str(refusal.value)


def test_a_service_with_an_unknown_setting_ends_with_one_line(engines: EnginePool) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(engines.model_folder(DENSE))]
    command += ["--kv-transfer-config", json.dumps(probe.transfer(memori="1GiB"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("kvoffload: unknown setting 'memori' in the engine's extra config; ")
    assert "Traceback" not in done.stderr + done.stdout
    assert "weights" not in done.stderr + done.stdout
