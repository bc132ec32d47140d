"""`kvoffload plan` says from a config alone what the real engine then keeps."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.kvspec import ReuseRule
from kvoffload.plan.model_shape import Keeps, ShapeTerms, read_config, read_shape
from kvoffload.plan.sizing import size_model
from tests.vllm import connector_probe as probe
from tests.vllm.engine import EnginePool
from tests.vllm.test_equality import LOCAL_CASES, MLA_CASE, Case, each

pytestmark = pytest.mark.vllm

KEEPS = {
    ReuseRule.PREFIX: Keeps.TOKENS,
    ReuseRule.WINDOW: Keeps.WINDOW,
    ReuseRule.EXACT_BOUNDARY: Keeps.STATE,
}


@each(*LOCAL_CASES, MLA_CASE)
def test_figures_are_those_of_the_engine(engines: EnginePool, case: Case) -> None:
    engine, model = case.acquire(engines), case.model
    side: Any = probe.scheduler_connector(engine)._scheduler
    kept: dict[Keeps, float] = {}
    for facts in side._parts.groups.facts:
        keeps = KEEPS[facts.rule.reuse]
        size = facts.record_bytes if keeps is Keeps.STATE else facts.record_bytes / facts.rule.block_size
        kept[keeps] = kept.get(keeps, 0) + size
    kv_dtype = str(case.arguments.get("kv_cache_dtype", "auto"))
    terms = ShapeTerms(kv_dtype=kv_dtype, state_dtype=str(model.engine_args.get("mamba_ssm_cache_dtype", "auto")))
    planned: dict[Keeps, float] = {}
    for group in size_model(read_shape(read_config(engines.model_folder(model)), terms)).groups:
        planned[group.keeps] = planned.get(group.keeps, 0) + group.token_bytes + group.state_bytes
    assert planned == kept
