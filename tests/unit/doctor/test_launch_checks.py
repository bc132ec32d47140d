"""A command that starts SGLang: the two of the page are well, and each thing that kvoffload refuses is found."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.doctor.launch_checks import LINKER, REFUSED, STORAGE, TESTED_SGLANG, Door, check_launch
from kvoffload.doctor.machine import SGLANG, Machine
from kvoffload.errors import UnsupportedError
from kvoffload.sglang import hicache_storage, plugin, tested
from kvoffload.sglang.start_up import refuse_unserved
from tests.kit.doctor.machines import like

PAGE = Path(__file__).parents[3] / "docs/sglang.md"
COMMANDS = [one for one in re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "launch_server" in one]
WELL = like(engines={SGLANG: TESTED_SGLANG}, nvidia_devices=())
SERVED: dict[str, Any] = {
    "device": "cpu",
    **dict.fromkeys(("pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size", "nnodes"), 1),
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "enable_multimodal": None,
    "disaggregation_mode": "null",
    "enable_memory_saver": False,
    "enable_linker_mla_dedup": False,
}
"""Arguments of an engine that kvoffload serves."""
ALIASES = {"--pipeline-parallel-size": "pp_size", "--data-parallel-size": "dp_size"}


def look(line: str, machine: Machine = WELL) -> list[tuple[str, str]]:
    return [(one.verdict.value, one.text) for one in check_launch(line, machine)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_are_well(command: str) -> None:
    assert look(command) == [("ok", "asks for kvoffload, with pages of 16 tokens")]


def test_the_page_has_a_command_for_each_door() -> None:
    assert [door.switch in command for command, door in zip(COMMANDS, (LINKER, STORAGE), strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("dynamic", "mooncake", "--unified-cache-external-linker-backend is mooncake"),
        ("--page-size 16", "", "pages have one token"),
        ("KVOffloadLinker", "Other", "--unified-cache-external-linker-config lacks linker"),
        ('{"server"', '{"serve"', "linker_extra_config: "),
        ("\"}}'", "'", "--unified-cache-external-linker-config is not JSON"),
        ("\"}}'", "", "the command cannot be read"),
        ("--enable-unified-cache-external-linker", "", "it asks for no cache outside of SGLang"),
        ("--device cpu", "--device cuda", "the engine runs on cuda"),
        ("--device cpu", "--device=cpu --pp-size=2", "kvoffload does not serve --pp-size 2 in SGLang yet"),
        ("--device cpu", "--device cpu --enable-multimodal", "does not serve --enable-multimodal in SGLang yet"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(old: str, new: str, text: str) -> None:
    assert old in COMMANDS[0]
    (finding,) = check_launch(COMMANDS[0].replace(old, new, 1), WELL)
    assert finding.verdict.value in ("fail", "warn")
    assert text in finding.text
    assert finding.remedy


def test_the_device_and_the_version_are_those_of_the_machine() -> None:
    line = COMMANDS[0].replace("--device cpu", "")
    assert look(line)[0][0] == "ok"
    with_gpu = like(engines={SGLANG: TESTED_SGLANG}, nvidia_devices=("/dev/nvidia0",))
    assert look(line, with_gpu) == [("fail", "the engine runs on cuda, which kvoffload does not serve in SGLang yet")]
    (other,) = look(line, like(engines={SGLANG: "0.5.20"}, nvidia_devices=()))
    assert other == ("fail", f"SGLang is 0.5.20, and kvoffload was tested with {TESTED_SGLANG}")
    (none,) = look(line, like(engines={}, nvidia_devices=()))
    assert none[0] == "warn"


# ---- the engine refuses the same ----


@pytest.mark.parametrize("option", REFUSED)
def test_an_engine_refuses_what_is_found(option: str) -> None:
    name = ALIASES.get(option, option.removeprefix("--").replace("-", "_"))
    assert name in SERVED
    refuse_unserved(SimpleNamespace(**SERVED))
    with pytest.raises(UnsupportedError):
        refuse_unserved(SimpleNamespace(**SERVED | {name: 2}))


def test_every_argument_that_an_engine_refuses_is_looked_for() -> None:
    looked_for = {ALIASES.get(option, option.removeprefix("--").replace("-", "_")) for option in REFUSED}
    assert looked_for == SERVED.keys() - {"device"}


@pytest.mark.parametrize(
    ("door", "module", "name"),
    [(LINKER, plugin, plugin.LINKER_NAME), (STORAGE, hicache_storage, hicache_storage.STORAGE_NAME)],
)
def test_names_are_those_that_sglang_loads(door: Door, module: Any, name: str) -> None:
    assert {module.__name__, name} <= set(door.wanted.values())
    assert tested.VERSION == TESTED_SGLANG
