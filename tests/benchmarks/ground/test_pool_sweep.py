"""Pools that are too small: no connector hits more than the bound, and each lost token is lost in one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.ground.models import GPT_OSS_120B, QWEN3_NEXT_80B
from benchmarks.ground.pool_sweep import sweep
from benchmarks.ground.scenarios import Ground
from kvoffload.bench.base import Result

pytestmark = pytest.mark.vllm

Rows = dict[str, Result]


@pytest.fixture(scope="module", params=[GPT_OSS_120B, QWEN3_NEXT_80B], ids=lambda model: model.name)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    """One run of each model for all tests."""
    ground = Ground(tmp_path_factory.mktemp("sweep"), is_short=True, seed=5, pools=(10,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield {row.name: row for row in sweep(request.param, ground)}


def test_no_connector_hits_more_than_the_bound(rows: Rows) -> None:
    row = rows["tokens hit, of the bound"]
    found: dict[str, Any] = dict(row.params)
    assert 0 < found["alone"] <= row.value <= found["bound"] <= found["all_hits"]
    assert max(found["all_ideal"], found["lean_ideal"]) <= found["bound"]


def test_each_lost_token_is_lost_in_one_place(rows: Rows) -> None:
    hits, lost = rows["tokens hit"], rows["tokens lost"]
    found: dict[str, Any] = dict(lost.params)
    assert lost.value - found["gained"] == hits.limit - hits.value
    places = set(found) - set(rows["tokens hit, of the bound"].params) - {"gained"}
    assert sum(found[name] for name in places) == lost.value


def test_nothing_is_left_of_requests_that_found_no_room(rows: Rows) -> None:
    assert rows["left at the end"].value == 0
