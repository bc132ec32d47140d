"""The page in a real browser, while engines work: its numbers are those of /stats, on a desk and on a phone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.web.page import make_policy, read_page
from tests.kit.cli.web_process import get, web
from tests.kit.server.tiers import await_that, disk_below, serving
from tests.kit.web.browser import WIDTHS, Browser, browsing
from tests.kit.web.prompt_load import PromptLoad

FIRST_TURNS = 60
SHOWN = """Object.fromEntries([...document.querySelectorAll('[data-told]')]
    .map((one) => [one.dataset.value || one.dataset.path, one.dataset.told]))"""


def read_told(stats: dict[str, Any]) -> dict[str, str]:
    """Makes the texts that the page should show, by the page's own names."""
    memory = dict(stats["memory"], fill=stats["memory"]["used_bytes"] / stats["memory"]["capacity_bytes"])
    told: dict[str, Any] = {f"memory.{name}": memory[name] for name in MEMORY}
    told |= {f"prompts.{name}": stats["prompts"][name] for name in ("hit_rate", "hit_ceiling", "saved_seconds")}
    told |= {"totals.evicted": stats["totals"]["evicted"], "sessions": stats["sessions"]}
    told |= {"namespaces": stats["namespaces"]}
    told |= {f"prompts.totals.{name}": count for name, count in stats["prompts"]["totals"].items() if count}
    told |= {f"tiers.{tier['name']}.used_bytes": tier["used_bytes"] for tier in stats["tiers"]}
    told |= {f"prompts.hit_rate_by_memory.{key}": rate for key, rate in stats["prompts"]["hit_rate_by_memory"].items()}
    told |= {f"memory_worth.{one['memory']:g}": one["saved_s"] for one in stats["memory_worth"]["sizes"]}
    told |= {
        f"ledger.tenants.{'null' if one['name'] is None else one['name']}": one["saved_s"]
        for one in stats["ledger"]["tenants"]
        if one["prompts"]
    }
    told |= {f"models.{model['fingerprint']}": model["used_bytes"] for model in stats["models"]}
    told |= {f"tenants.{tenant['name']}": tenant["used_bytes"] for tenant in stats["tenants"]}
    told |= {f"calls.{call['name']}.{call['label']}": call["count"] for call in stats["calls"] if call["count"]}
    told |= {f"errors.{code}": count for code, count in stats["errors"].items()}
    # Both languages write the shortest text that means the same number.
    return {name: "" if value is None else repr(value).removesuffix(".0") for name, value in told.items()}


CUT = (
    "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.id)"
)
ALL = "[...document.querySelectorAll('main *')]"
MEMORY = ("fill", "used_bytes", "capacity_bytes", "blocks", "leases", "reserved")


@contextmanager
def working(load: PromptLoad) -> Iterator[None]:
    """Prompt after prompt, until the end of the block."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(0.002):
            load.turn()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    return folder


def looks(browser: Browser) -> int:
    return int(browser.run("Number(document.body.dataset.seen || 0)"))


def test_it_shows_what_stats_tells_while_engines_work_and_when_they_rest(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "s"
    with (
        browsing(tmp_path / "browser") as browser,
        serving(path, tiers={"": [disk_below(folder)]}) as server,
        web(path) as address,
    ):
        await_that(lambda: server.has_memory)
        load = PromptLoad(path)
        for _ in range(FIRST_TURNS):
            load.turn()
        with working(load):
            browser.open(address)
            await_that(lambda: looks(browser) >= 3)
            hits = "Number(document.querySelector('[data-path=\"prompts.totals.hit_memory\"]').dataset.told)"
            before = browser.run(hits)
            await_that(lambda: browser.run(hits) > before)
            browser.wait_for("document.querySelectorAll('#tokens svg polygon').length > 0")

        def is_equal() -> bool:
            status, body = get(f"{address}/stats")
            return status == 200 and browser.run(SHOWN) == read_told(json.loads(body))

        await_that(is_equal)
        shown = browser.run("document.body.innerText")
        assert "made-up/model-8b" in shown
        assert "NaN" not in shown
        assert "undefined" not in shown
        assert not re.search(r"[a-z]_[a-z]", shown), "labels are words"
        assert browser.run("[...document.querySelectorAll('th')].every((one) => one.textContent)")
        explained = "[...document.querySelectorAll('[data-label], #outcomes td > span, #calls td > span')]"
        assert browser.run(f"{explained}.length > 15 && {explained}.every((one) => one.title && one.textContent)")
        for width in WIDTHS:
            browser.look_like(width=width)
            assert browser.run(CUT) == [], width
        asked = browser.run("performance.getEntriesByType('resource').map((one) => one.name)")
        assert all(name.startswith(address) for name in asked)
        assert browser.complaints == []
        load.close()


def test_it_fits_a_phone_and_follows_the_users_colours(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with browsing(tmp_path / "browser") as browser, serving(path) as server, web(path) as address:
        await_that(lambda: server.has_memory)
        browser.open(address)
        await_that(lambda: looks(browser) >= 1)
        papers = []
        for scheme in ("light", "dark"):
            browser.look_like(width=360, height=740, scheme=scheme, is_phone=True)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            sizes = browser.run(f"{ALL}.map((one) => parseFloat(getComputedStyle(one).fontSize))")
            assert min(sizes) >= 11
            papers.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        assert len(set(papers)) == 2
        browser.photograph(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_it_says_when_the_server_is_away_and_comes_back_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with browsing(tmp_path / "browser") as browser, web(path) as address:
        browser.open(address)
        browser.wait_for("document.getElementById('away').textContent.startsWith('no answer from the cache server')")
        with serving(path) as server:
            await_that(lambda: server.has_memory)
            browser.wait_for("document.getElementById('state').textContent === 'live'")
            assert browser.run("document.getElementById('away').hidden")
        browser.wait_for("document.getElementById('state').textContent === 'away'")


def test_only_its_own_script_runs() -> None:
    policy = read_page().headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy
    text = read_page().body.decode().replace("http://www.w3.org/2000/svg", "")
    assert 'style="' not in text
    assert not any(mark in text for mark in ("http://", "https://", "src=", "@import"))
    assert make_policy("<script>a</script><style>b</style>") != make_policy("<script>c</script><style>b</style>")
