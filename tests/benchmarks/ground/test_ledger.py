"""Tokens that another connector hits: the ledger says where ours lost them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.ledger import PoolLedger
from benchmarks.ground.models import GPT_OSS_120B, LLAMA_8B
from benchmarks.ground.trial import open_ours
from benchmarks.ground.work import Ask, make_fresh, make_tokens
from kvoffload.units import GIB

pytestmark = pytest.mark.vllm

DOCUMENT = 4000


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_windows_are_never_saved_where_prompts_part() -> None:
    document = make_tokens(1, DOCUMENT)
    first, second = (Ask(f"tail {seed}", document + make_tokens(seed, 800), make_tokens(9, 8)) for seed in (2, 3))
    with open_ours(GPT_OSS_120B, EngineSettings()) as engine:
        ledger = PoolLedger(engine)
        ledger.watch(engine)
        before = engine.serve([first])
        assert engine.forget()
        run = engine.serve([second])
        ledger.add([*before.served, *run.served])
        lost = ledger.explain(run.served, {second.name: DOCUMENT})
    assert run.served[0].cached_tokens == 0
    assert dict(lost) == {"window never saved": DOCUMENT}


def test_blocks_that_made_room_for_others_are_evicted() -> None:
    asks = make_fresh(8, tokens=2048, new_tokens=8, per_s=0)
    with open_ours(LLAMA_8B, EngineSettings(), pool_bytes=GIB) as engine:
        ledger = PoolLedger(engine)
        ledger.watch(engine)
        served = [one for ask in asks for one in engine.serve([ask]).served]
        assert engine.forget()
        again = [Ask("again", asks[0].prompt, asks[0].answer)]
        run = engine.serve(again)
        ledger.add([*served, *run.served])
        hit = run.served[0].cached_tokens
        lost = ledger.explain(run.served, {"again": 2032})
    assert hit < 2032
    assert dict(lost) == {"block evicted": 2032 - hit}
