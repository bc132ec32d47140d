"""The class that HiCache loads, derived from classes of the form of SGLang's own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload.errors import ConfigError, UnsupportedError
from kvoffload.sglang import hicache_storage, start_up
from kvoffload.sglang.host_pages import HostPages
from kvoffload.sglang.weights import WeightMask
from tests.kit.sglang.host_pools import MHATokenToKVPoolHost, fill_host
from tests.kit.sglang.linked import link, make_keys
from tests.kit.sglang.pools import rows_of

KEYS = make_keys(2)


class PoolName(Enum):
    """The names that SGLang gives pools."""

    KV = "kv"
    SWA = "swa"


class Base:
    """A stand-in for HiCacheStorage."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {host_pool_name: host_pool}


@dataclass
class Result:
    """A stand-in for PoolTransferResult."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int]


class Made:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = MHATokenToKVPoolHost("page_first_direct")
        fill_host(self.pool, 1)
        self.linked = link(self.pool)
        model = torch.nn.Linear(2, 2)
        weights = WeightMask(lambda: [model])
        weights.take()
        self.given: dict[str, Any] = {}

        def start(arguments: Any, pool: Any, **given: Any) -> HostPages:
            self.given = given
            assert (arguments, pool) == ("arguments", self.pool)
            return HostPages(self.linked.linker, weights)

        monkeypatch.setattr(start_up, "start_host_pages", start)
        kind = hicache_storage.derive_storage(
            Base, Result, version="0", find_arguments=lambda: "arguments", find_group=lambda: None
        )
        extra = {"interface_v1": 1, "settings": {"memory": "1GiB"}}
        self.storage = kind(SimpleNamespace(extra_config=extra, tp_rank=1, is_mla_model=False), {})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made(monkeypatch)
    made.storage.register_mem_pool_host(made.pool)
    made.storage.register_mem_host_pool_v2(made.pool, PoolName.KV)
    return made


def rows(*pages: int) -> torch.Tensor:
    return torch.tensor(rows_of(*pages))


def transfer(*pages: int, name: PoolName = PoolName.KV) -> Any:
    return SimpleNamespace(name=name, keys=KEYS[: len(pages)], host_indices=rows(*pages))


def test_pages_go_out_and_come_back(made: Made) -> None:
    storage, saved = made.storage, made.pool.rows(0, 1).clone()
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS, rows(0, 1)) == [True, True]
    made.pool.kv_buffer.zero_()
    assert storage.batch_exists(KEYS) == 2
    assert storage.exists(KEYS[0])
    assert storage.batch_get_v1([*KEYS, *make_keys(1, seed=9)], rows(4, 5, 6)) == [True, True, False]
    assert torch.equal(made.pool.rows(4, 5), saved)
    assert made.given["settings"] == {"memory": "1GiB"}
    assert made.given["rank"] == 1
    storage.close()
    storage.close()
    assert made.linked.cache.is_closed


def test_the_same_by_pools(made: Made) -> None:
    storage, saved = made.storage, made.pool.rows(0, 1).clone()
    assert storage.batch_set_v2([transfer(0, 1)]) == {PoolName.KV: [True, True]}
    assert storage.batch_get_v2([transfer(4, 5)]) == {PoolName.KV: [True, True]}
    assert torch.equal(made.pool.rows(4, 5), saved)
    assert storage.batch_exists_v2(KEYS) == Result(2, {"kv": 2}, [1, 2])
    assert storage.batch_exists_v2(make_keys(1, seed=9)) == Result(0, {}, [])


def test_pages_of_another_pool_are_no_hit(made: Made) -> None:
    made.storage.batch_set_v1(KEYS, rows(0, 1))
    window = transfer(4, name=PoolName.SWA)
    assert made.storage.batch_exists_v2(KEYS, [window]) == Result(0, {}, [])
    assert made.storage.batch_get_v2([window]) == {PoolName.SWA: [False]}
    assert made.storage.batch_set_v2([window]) == {PoolName.SWA: [False]}


def test_another_pool_is_refused_when_it_is_registered(made: Made) -> None:
    for pool, name in ((made.pool, PoolName.SWA), (MHATokenToKVPoolHost("layer_first"), PoolName.KV)):
        with pytest.raises(UnsupportedError, match=f"host pool {name.value} yet"):
            made.storage.register_mem_host_pool_v2(pool, name)
        assert made.linked.cache.is_closed


def test_a_fault_of_ours_is_a_miss_and_is_told(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    assert made.storage.batch_exists(["no hexadecimal"]) == 0
    assert made.storage.batch_get_v1(["no hexadecimal"], rows(4)) == [False]
    assert not any(made.storage.batch_set_v1(["no hexadecimal"], rows(4)))
    assert "batch_exists failed" in caplog.text


def test_before_a_pool_is_registered_there_are_no_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Made(monkeypatch).storage.batch_exists(KEYS) == 0


def test_copies_page_by_page_are_refused(made: Made) -> None:
    kind = type(made.storage)
    for extra in (None, {}, {"interface_v1": 0}):
        with pytest.raises(ConfigError, match="interface_v1"):
            kind(SimpleNamespace(extra_config=extra), {})
    for name in ("get", "batch_get", "set", "batch_set"):
        with pytest.raises(UnsupportedError, match="one by one"):
            getattr(made.storage, name)(KEYS)


def test_a_pool_that_others_use_is_not_emptied(made: Made) -> None:
    made.storage.batch_set_v1(KEYS, rows(0, 1))
    with pytest.raises(UnsupportedError, match="other engines"):
        made.storage.clear()
    assert made.storage.batch_exists(KEYS) == 2


def test_the_module_is_imported_without_sglang_and_has_one_name() -> None:
    code = "import sys, kvoffload.sglang.hicache_storage as m; sys.exit('sglang' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="Other"):
        _ = hicache_storage.Other
