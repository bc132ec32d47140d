"""A pool that grows: what the log says, and what a shortage does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kvoffload.cache import LocalCache
from kvoffload.errors import CacheMemoryError
from kvoffload.server.sessions.pool_growth import PoolGrowth
from kvoffload.units import MIB
from tests.kit.scarce_threads import scarce_threads
from tests.kit.server.pools import GROWING

SHORT = CacheMemoryError("16MiB of memory are not there: 4KiB are left", remedy="more")


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    with LocalCache.begin(GROWING) as made:
        yield made


def growing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvoffload-growth"]


def run_to_end(growth: PoolGrowth) -> None:
    growth.start()
    for thread in growing_threads():
        thread.join(60)
    assert growing_threads() == []


def test_its_log_has_begin_and_end_and_each_tenth_for_debugging(
    cache: LocalCache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kvoffload.server.sessions.pool_growth"):
        run_to_end(PoolGrowth(cache, name="chat"))
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert told == [
        "the memory of domain 'chat' is served and grows: 16MiB of 256MiB so far",
        "the memory of domain 'chat' is all there: 256MiB",
    ]
    assert 8 <= len(caplog.records) - 2 <= 10


def test_a_shortage_is_one_warning_with_both_figures_and_is_tried_again(
    cache: LocalCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow, asked = cache.grow, 0

    def grow_now_and_then(_keep_free_bytes: int) -> bool:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:
            raise SHORT
        return grow()

    monkeypatch.setattr(cache, "grow", grow_now_and_then)
    with caplog.at_level(logging.INFO, "kvoffload.server.sessions.pool_growth"):
        run_to_end(PoolGrowth(cache, retry_s=0.0))
    assert cache.ready_bytes == 256 * MIB
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"the memory stays smaller for now, 48MiB of 256MiB: {SHORT}"]


def test_what_waits_for_memory_ends_at_once(cache: LocalCache, monkeypatch: pytest.MonkeyPatch) -> None:
    was_asked = threading.Event()

    def refuse(_keep_free_bytes: int) -> bool:
        was_asked.set()
        raise SHORT

    monkeypatch.setattr(cache, "grow", refuse)
    growth = PoolGrowth(cache, retry_s=1e6)
    growth.start()
    assert was_asked.wait(60)
    growth.close()
    assert cache.ready_bytes == 16 * MIB


def test_without_a_thread_a_pool_stays_as_it_is_and_tries_again(
    cache: LocalCache, caplog: pytest.LogCaptureFixture
) -> None:
    growth = PoolGrowth(cache)
    with scarce_threads(), caplog.at_level(logging.WARNING, "kvoffload.server.sessions.pool_growth"):
        for _ in range(3):
            growth.start()
    assert [record.getMessage() for record in caplog.records] == [
        "the memory stays smaller for now, 16MiB of 256MiB: can't start new thread"
    ]
    assert cache.ready_bytes == 16 * MIB
    run_to_end(growth)
    growth.start()
    assert growing_threads() == []
    assert cache.ready_bytes == 256 * MIB
    growth.close()


def test_one_that_never_began_can_be_closed(cache: LocalCache) -> None:
    PoolGrowth(cache).close()
    assert not cache.grow()


def test_it_grows_by_no_more_than_what_engines_have_let_go_of(
    cache: LocalCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    former_bytes, peaks, grow = 200 * MIB, [], cache.grow
    growth = PoolGrowth(cache, step_bytes=16 * MIB)

    def release_some(record: logging.LogRecord) -> bool:
        """The growth's thread says that it waits: then an engine lets go of something."""
        nonlocal former_bytes
        if "waits to grow" in record.getMessage():
            former_bytes = max(former_bytes - 50 * MIB, 0)
            growth.limit(former_bytes)
        return True

    def grow_counted(_keep_free_bytes: int) -> bool:
        is_growing = grow()
        peaks.append(cache.ready_bytes + former_bytes)
        return is_growing

    monkeypatch.setattr(cache, "grow", grow_counted)
    caplog.handler.addFilter(release_some)
    growth.limit(former_bytes)
    with caplog.at_level(logging.INFO, "kvoffload.server.sessions.pool_growth"):
        run_to_end(growth)
    caplog.handler.removeFilter(release_some)
    assert cache.ready_bytes == max(peaks) == 256 * MIB
    told = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert told == [
        f"the memory waits to grow: engines still have {size}MiB of a former server" for size in (200, 150, 100, 50)
    ]


def test_what_engines_do_not_let_go_of_keeps_nobody_from_the_end(cache: LocalCache) -> None:
    growth = PoolGrowth(cache, step_bytes=16 * MIB)
    growth.limit(256 * MIB)
    growth.start()
    growth.close()
    assert growing_threads() == []
    assert cache.ready_bytes == 16 * MIB
