"""Refusals of an SGLang rank at its start, and how it joins a real server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.client.credit_stock import POOL_SHARE, CreditStock, fit_stocks
from kvoffload.client.inspector import Inspector
from kvoffload.errors import ConfigError, IdentityError, ServerError, UnsupportedError
from kvoffload.sglang import start_up, weights
from kvoffload.sglang.page_linker import PageLinker
from kvoffload.sglang.pools import describe_pool
from kvoffload.sglang.start_up import (
    PREFILL_TOKENS,
    STEP_STATES,
    agree_within,
    name_line,
    plan_stocks,
    refuse_unserved,
    start_host_pages,
    start_linker,
)
from tests.kit.children import child
from tests.kit.connector.tiers import wait_for
from tests.kit.sglang.host_pools import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from tests.kit.sglang.linked import make_keys, pages_of
from tests.kit.sglang.pools import (
    PAGE,
    HybridLinearKVPool,
    MHATokenToKVPool,
    SWAKVPool,
    clear,
    copy_rows,
    fill,
    rows_of,
)
from tests.unit.client.conftest import SERVER

VERSION = "0.5.23"


class Component(Enum):
    """Parts of the engine's tree."""

    FULL = 0
    SWA = 1
    MAMBA = 2
    INDEXER = 3


FULL = Component.FULL


class Arguments:
    """Those that a start reads, each off."""

    model_path: str
    attention_backend: str

    def __init__(self, **given: object) -> None:
        self.model_path, self.revision, self.attention_backend = "who/what", "c" * 40, "torch_native"
        self.device, self.disaggregation_mode, self.chunked_prefill_size = "cpu", "null", 64
        self.tp_size = self.pp_size = self.dp_size = self.attn_dp_size = self.nnodes = 1
        self.attn_cp_size = self.dcp_size = 1
        self.enable_dp_attention = self.enable_memory_saver = self.enable_linker_mla_dedup = False
        self.speculative_algorithm = self.enable_lora = self.lora_paths = self.enable_multimodal = None
        self.hicache_storage_backend = "dynamic"
        for name, value in given.items():
            setattr(self, name, value)


def make_params(pool: Any = None, **given: object) -> Any:
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    usual = {
        "page_size": PAGE,
        "token_to_kv_pool_allocator": allocator,
        "tp_cache_group": None,
        "mtp_draft_device_pools": (),
        "sidecar_draft_device_pools": (),
        "sliding_window_size": None,
        "swa_gates_prefix_match": True,
        "decoder_swa_bounded_replay": False,
        "draft_swa_window": 0,
        "enable_mamba_extra_buffer": False,
    }
    return SimpleNamespace(**{**usual, **given})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("server") / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves"):
        yield path


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine, the same weights in every test."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    monkeypatch.setattr(weights, "find_models", lambda: [model])


def start(server: Path, pool: Any, **given: object) -> PageLinker:
    linker, _, _ = start_linker(
        Arguments(**given),
        make_params(pool),
        components={FULL},
        extra_config={"server": str(server), "acquire_deadline": "5s", "step_budget": "1s", "memory": "64MiB"},
        version=VERSION,
    )
    return linker


def save(linker: PageLinker, keys: list[str], rows: list[int]) -> bool:
    """Slots come from the server, in their own time."""

    def is_saved() -> bool:
        linker.begin_step()
        linker.offload([pages_of(keys, rows)])
        while not linker.count_done():
            pass
        return linker.pop_done()

    return wait_for(is_saved)


def test_a_rank_finds_what_one_like_it_has_saved_and_no_other_does(
    server: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool, keys = MHATokenToKVPool(), make_keys(2, seed=31)
    fill(pool, 1)
    before = copy_rows(pool, list(range(pool.rows)))
    linker = start(server, pool)
    assert all(torch.equal(*both) for both in zip(copy_rows(pool, list(range(pool.rows))), before, strict=True))
    assert "keeps pages of rank 0" in caplog.text
    (told,) = Inspector(linker.cache.look_into).survey_engines().list_kinds()
    assert told == {"engine": f"sglang {VERSION}", "model": "who/what", "sessions": 1, "processes": 1}
    try:
        assert save(linker, keys, rows_of(1, 2))
    finally:
        linker.close()
    saved = copy_rows(pool, rows_of(1, 2))
    clear(pool)
    again, other = start(server, pool), start(server, MHATokenToKVPool(), attention_backend="other")
    try:
        again.begin_step()
        assert again.lookup("r", keys) == [1, 2]
        assert again.load("r", [pages_of(keys, rows_of(4, 5))])
        assert all(torch.equal(*both) for both in zip(copy_rows(pool, rows_of(4, 5)), saved, strict=True))
        other.begin_step()
        assert other.lookup("r", keys) == []
    finally:
        again.close()
        other.close()


def test_an_engine_starts_without_a_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    linker = start(tmp_path / "nobody", MHATokenToKVPool())
    try:
        assert linker.lookup("r", make_keys(1)) == []
        assert "starts without a cache server" in caplog.text
    finally:
        linker.close()


def test_a_tree_that_keeps_other_pages_than_the_pools_have_is_refused(server: Path) -> None:
    for pool, components in ((SWAKVPool(), {FULL}), (MHATokenToKVPool(), {FULL, Component.SWA})):
        with pytest.raises(UnsupportedError, match="SGLang's tree has parts"):
            start_linker(
                Arguments(),
                make_params(pool, sliding_window_size=7),
                components=components,
                extra_config={"server": str(server)},
                version=VERSION,
            )


@pytest.mark.parametrize("kind", [Component.SWA, Component.MAMBA])
def test_pools_of_pools_come_to_a_server_with_all_their_groups(server: Path, kind: Component) -> None:
    pool = SWAKVPool() if kind is Component.SWA else HybridLinearKVPool()
    linker, _, pages = start_linker(
        Arguments(),
        make_params(pool, sliding_window_size=7),
        components={FULL, kind},
        extra_config={"server": str(server), "acquire_deadline": "5s", "step_budget": "1s"},
        version=VERSION,
    )
    try:
        assert pages.group_names == ("kv", kind.name.lower())
        assert len(linker.settings.groups) == 2
    finally:
        linker.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "cuda"}, "engines on cuda"),
        ({"pp_size": 2}, "pipeline"),
        ({"dp_size": 2}, "data parallel"),
        ({"attn_dp_size": 2}, "data parallel"),
        ({"enable_dp_attention": True}, "data parallel"),
        ({"attn_cp_size": 2}, "context parallel"),
        ({"nnodes": 2}, "several machines"),
        ({"speculative_algorithm": "EAGLE"}, "speculative"),
        ({"enable_multimodal": True}, "multimodal"),
        ({"disaggregation_mode": "prefill"}, "disaggregated"),
        ({"enable_memory_saver": True}, "gives back"),
        ({"enable_linker_mla_dedup": True}, "one rank for all"),
    ],
)
def test_what_was_not_tested_is_refused_by_name(given: dict[str, object], told: str) -> None:
    refuse_unserved(Arguments(), make_params(), {FULL})
    with pytest.raises(UnsupportedError, match=told):
        refuse_unserved(Arguments(**given), make_params(), {FULL})


def test_state_of_another_kind_and_pools_of_drafts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="models with indexer state"):
        refuse_unserved(Arguments(), make_params(), {FULL, Component.INDEXER})
    for given in ({"draft_swa_window": 4}, {"swa_gates_prefix_match": False}, {"decoder_swa_bounded_replay": True}):
        with pytest.raises(UnsupportedError, match="windows that are not the model's own"):
            refuse_unserved(Arguments(), make_params(**given), {FULL, Component.SWA})
    with pytest.raises(UnsupportedError, match="states in extra buffers"):
        refuse_unserved(Arguments(), make_params(enable_mamba_extra_buffer=True), {FULL, Component.MAMBA})
    with pytest.raises(UnsupportedError, match="pools of draft models"):
        refuse_unserved(Arguments(), make_params(sidecar_draft_device_pools=(object(),)), {FULL})


def test_whatever_fails_at_the_start_leaves_nothing_open(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def note(*given: Any, **options: Any) -> Any:
        opened.append(open_engine(*given, **options))
        return opened[-1]

    open_engine = start_up.open_engine
    monkeypatch.setattr(start_up, "open_engine", note)
    with pytest.raises(IdentityError):
        start(server, MHATokenToKVPool(), revision="main")
    assert opened == []

    def refuse(*_: object, **__: object) -> None:
        raise ServerError("it refuses")

    monkeypatch.setattr(start_up.CacheAccess, "open", refuse)
    with pytest.raises(ServerError):
        start(server, MHATokenToKVPool())
    (engine,) = opened
    assert not engine.poll()
    with pytest.raises(Exception, match="closed"):
        engine.submit(*make_plan())


def make_plan() -> tuple[Any, Any]:
    from kvoffload.transfer import CopyDirection, CopyItems

    record = np.zeros(4096, np.uint8)
    return CopyDirection.SAVE, CopyItems(group=np.array([0]), block=np.array([1]), slot=np.array([record.ctypes.data]))


def test_a_setting_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="sever"):
        start_linker(Arguments(), make_params(), components={FULL}, extra_config={"sever": "1GiB"}, version=VERSION)


def test_a_host_pool_finds_what_a_linker_has_saved(server: Path) -> None:
    """Both doors of a server lead to the same pages."""
    pool, keys = MHATokenToKVPool(), make_keys(2, seed=33)
    fill(pool, 1)
    linker = start(server, pool)
    try:
        assert save(linker, keys, rows_of(1, 2))
    finally:
        linker.close()
    host = MHATokenToKVPoolHost("page_first")
    settings = {"server": str(server), "acquire_deadline": "5s", "step_budget": "1s", "memory": "64MiB"}
    arguments = Arguments(hicache_mem_layout="page_first")
    for rank, expected in ((0, 2), (1, 0)):
        pages = start_host_pages(
            arguments, host, rank=rank, settings=settings, is_same_everywhere=False, version=VERSION
        )
        try:
            assert pages.fetch(keys, np.array(rows_of(5, 6))) == expected
        finally:
            pages.close()
    saved = torch.stack(copy_rows(pool, rows_of(1, 2)))
    assert torch.equal(host.rows(5, 6).flatten(0, 1), saved)


def test_a_rank_whose_bytes_all_have_finds_those_of_the_first(server: Path) -> None:
    keys, settings = make_keys(1, seed=34), {"server": str(server), "acquire_deadline": "5s", "step_budget": "1s"}
    host = MLATokenToKVPoolHost("page_first_direct")
    given: Any = {"settings": {**settings, "memory": "64MiB"}, "is_same_everywhere": True, "version": VERSION}
    first = start_host_pages(Arguments(), host, rank=0, **given)
    try:
        assert first.back_up(keys, np.array(rows_of(3)))
    finally:
        first.close()
    second = start_host_pages(Arguments(), host, rank=1, **given)
    try:
        assert second.count(keys) == 1
    finally:
        second.close()


def test_a_host_pool_is_refused_for_the_same_as_a_linker() -> None:
    with pytest.raises(UnsupportedError, match="multimodal"):
        start_host_pages(
            Arguments(enable_multimodal=True), None, rank=0, settings={}, is_same_everywhere=False, version=VERSION
        )


def agree_as(rank: int, store: str) -> bytes:
    import torch.distributed as ranks

    ranks.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    agree = agree_within(ranks.group.WORLD)
    assert agree is not None
    agree(bytes(32))
    return agree(bytes([rank]) * 32)


def test_ranks_agree_in_one_mask_of_what_each_has(tmp_path: Path) -> None:
    assert agree_within(None) is None
    with ProcessPoolExecutor(2, get_context("spawn")) as ranks:
        masks = list(ranks.map(agree_as, (0, 1), [str(tmp_path / "store")] * 2))
    assert masks == [sha256(bytes([0]) * 32 + bytes([1]) * 32).digest()] * 2


@pytest.mark.parametrize("backend", [None, "file"])
def test_a_storage_that_is_attached_to_a_running_engine_is_refused(backend: str | None) -> None:
    """HiCache may have pages of weights that are gone."""
    with pytest.raises(UnsupportedError, match="attached while they run"):
        start_behind_hicache(Arguments(hicache_storage_backend=backend))


def test_behind_hicache_weights_that_cannot_be_looked_at_are_refused_and_nothing_stays_open(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[PageLinker](), PageLinker.close
    monkeypatch.setattr(weights, "find_models", list)
    monkeypatch.setattr(PageLinker, "close", lambda linker: (closed.append(linker), close(linker)))
    with pytest.raises(UnsupportedError, match="weights cannot be looked at"):
        start_host_pages(
            Arguments(),
            MHATokenToKVPoolHost("page_first"),
            rank=0,
            settings={"server": str(server)},
            is_same_everywhere=False,
            version=VERSION,
        )
    assert len(closed) == 1


@pytest.mark.parametrize("is_full", [False, True])
def test_a_large_hybrid_model_has_slots_for_the_pages_and_the_states_of_what_it_computes(is_full: bool) -> None:
    """Qwen3-Next-80B: 24 KiB of keys and values a token, and 74 MiB a state, as much as 3,000 tokens have. A stock of
    as many states as tokens would leave no room for these."""
    geometry = describe_pool(HybridLinearKVPool(page_size=1), page_size=1).geometry
    sizes = (24 << 10, 74 << 20)
    wanted = plan_stocks(geometry, PREFILL_TOKENS)
    stocks = [CreditStock(group, wanted[group], slot_bytes=size) for group, size in enumerate(sizes)]
    fit_stocks(stocks, 64 << 30, is_full=is_full)
    pages, states = stocks
    # It is filled up below half.
    assert pages.high // 2 >= PREFILL_TOKENS
    assert states.high // 2 >= STEP_STATES
    assert sum(stock.high * size for stock, size in zip(stocks, sizes, strict=True)) <= (64 << 30) // POOL_SHARE


@pytest.mark.parametrize(("told", "expected"), [(64, 64), (-1, 8192), (None, 8192), (101, 104)])
def test_stocks_are_for_what_a_step_computes(told: int | None, expected: int) -> None:
    geometry = describe_pool(SWAKVPool(), page_size=PAGE, window=7).geometry
    assert plan_stocks(geometry, told) == (expected, expected)


class RawArguments(Arguments):
    """Arguments as a user gave them; the engine has decided the rest."""

    def __init__(self, *, decided: dict[str, object], **given: object) -> None:
        super().__init__(**given)
        self.decided = decided

    def resolved_dict(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "decided"} | self.decided


def start_behind_hicache(arguments: Any) -> Any:
    return start_host_pages(arguments, None, rank=0, settings={}, is_same_everywhere=False, version=VERSION)


def start_alone(arguments: Any) -> Any:
    return start_linker(arguments, make_params(), components={FULL}, extra_config={}, version=VERSION)


@pytest.mark.parametrize("begin", [start_alone, start_behind_hicache])
def test_what_the_engine_has_decided_is_refused_as_what_was_given(begin: Any) -> None:
    with pytest.raises(UnsupportedError, match="data parallel"):
        begin(RawArguments(decided={"attn_dp_size": 2}))
    with pytest.raises(UnsupportedError, match="multimodal"):
        begin(RawArguments(decided={}, _model_config=SimpleNamespace(is_multimodal=True)))


@pytest.mark.parametrize(
    ("logger", "text", "line"),
    [
        ("kvoffload.client.link", "not served: %s", "kvoffload: not served: why"),
        ("kvoffload.sglang.start_up", "kvoffload keeps pages in %s", "kvoffload keeps pages in why"),
        ("sglang.srt", "not served: %s", "not served: why"),
        ("kvoffloads", "not served: %s", "not served: why"),
    ],
)
def test_a_line_of_ours_begins_with_our_name(logger: str, text: str, line: str) -> None:
    record = logging.LogRecord(logger, logging.INFO, "", 1, text, ("why",), None)
    assert name_line(record)
    assert name_line(record)
    assert record.getMessage() == line
