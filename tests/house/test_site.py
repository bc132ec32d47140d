"""The site has every page, and every link and anchor leads somewhere. `make docs-site` builds it, strictly."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs.generate import PLACE, SEARCH, render_site_pages, render_tables
from docs.site import SitePages
from kvoffload.config.sources import describe_settings
from kvoffload.errors import walk_errors
from kvoffload.metrics.catalog import CATALOG
from kvoffload.metrics.labels import CALLS, OUTCOMES, SHOWN
from kvoffload.protocol import MESSAGES
from kvoffload.protocol.shape import name_of
from kvoffload.sglang.linker_metrics import RECORDED
from tests.house.tree import ROOT
from tests.kit.web.browser import browsing

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
MADE = render_site_pages()
TABLES = render_tables()
PAGES = SitePages(made=MADE, tables=TABLES).add_all()
_FENCE = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)


def walk_nav(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for inside in part.values() if isinstance(part, dict) else part:
            yield from walk_nav(inside)


def find_anchors(text: str) -> set[str]:
    """Finds anchors as Python-Markdown makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def test_the_navigation_has_every_page_once() -> None:
    nav = list(walk_nav(CONFIG["nav"]))
    elsewhere = [f"{line.strip('/')}{'*' if line.endswith('/') else ''}" for line in CONFIG["not_in_nav"].split()]
    rest = {page for page in PAGES.texts if not any(fnmatch.fnmatch(page, f"{pattern}*") for pattern in elsewhere)}
    assert sorted(nav) == sorted(rest)


def test_pages_of_the_site_alone_have_a_row_for_each_message() -> None:
    assert not any((ROOT / path).exists() for path in MADE)
    assert set(MADE) <= set(PAGES.texts)
    for message in MESSAGES:
        row = rf"^\| {message.op} +\| \[`{name_of(message)}`\]\(#{name_of(message)}\) +\|"
        assert re.search(row, MADE["docs/protocol-messages.md"], re.MULTILINE), message


def test_tables_of_the_site_have_a_row_for_each_setting_metric_error_and_label() -> None:
    assert all(f"| `{row.name}` |" in TABLES["settings"] for row in describe_settings())
    assert all(f"| `{metric.name}` |" in TABLES["metrics"] for metric in CATALOG)
    assert all(f"| `{name}` | vLLM, SGLang" in TABLES["metrics"] for name in RECORDED)
    assert all(f"| `{kind.code}` |" in TABLES["errors"] for kind in walk_errors())
    assert all(f"| {one.words} |" in TABLES["labels"] for one in (*OUTCOMES.values(), *CALLS.values(), *SHOWN.values()))


def test_each_table_of_the_site_has_one_place_and_no_place_is_left() -> None:
    for name, table in TABLES.items():
        assert sum(text.count(table) for text in PAGES.texts.values()) == 1, name
    left = re.compile(re.escape(PLACE).replace(r"\{name\}", ".*?"))
    assert [page for page, text in PAGES.texts.items() if left.search(text) and not page.endswith(".py.md")] == []


def test_the_gallery_of_models_has_a_search() -> None:
    page = PAGES.texts["docs/models.md"]
    assert page.index(SEARCH) < page.index("| model | config |")


def test_a_search_leaves_rows_that_have_all_words(tmp_path: Path) -> None:
    names = ("Qwen3-Next, states", "Qwen3-235B, attention", "Jamba, states")
    file = tmp_path / "page.html"
    rows = "".join(f"<tr><td>{name}</td></tr>" for name in names)
    table = f"<table><thead><tr><th>model</th></tr></thead><tbody>{rows}</tbody></table>"
    file.write_text(f"<!doctype html><meta charset=utf-8><table></table>{SEARCH}{table}")
    with browsing(tmp_path / "browser") as browser:
        browser.open(file.as_uri())
        for asked, left in (("", names), ("QWEN", names[:2]), ("states  qwen", names[:1]), ("none", ())):
            browser.run(
                f"(() => {{ const field = document.getElementById('table-search'); field.value = '{asked}';"
                "field.dispatchEvent(new Event('input')) })()"
            )
            visible = (
                "[...document.querySelectorAll('tbody tr')].filter(one => one.offsetParent).map(one => one.innerText)"
            )
            assert browser.run(visible) == list(left)
            assert browser.run("document.getElementById('table-found').innerText") == f"{len(left)} of 3 models"
        assert browser.complaints == []


def test_links_and_anchors_lead_somewhere() -> None:
    broken = []
    for page, text in PAGES.texts.items():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", _FENCE.sub("", text)):
            if "://" in target:
                continue
            there = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
            if there not in PAGES.texts and there not in PAGES.copies:
                broken.append(f"{page}: {target}")
            elif anchor and anchor not in find_anchors(PAGES.texts[there]):
                broken.append(f"{page}: {target}#{anchor}")
    assert broken == []


def test_a_former_address_leads_to_a_page_and_is_none_itself() -> None:
    redirects = next(plugin["redirects"] for plugin in CONFIG["plugins"] if "redirects" in plugin)
    for former, now in redirects["redirect_maps"].items():
        page, _, anchor = now.partition("#")
        assert former not in PAGES.texts, former
        assert page in PAGES.texts, now
        assert not anchor or anchor in find_anchors(PAGES.texts[page]), now


def test_what_pages_link_to_is_laid_out(tmp_path: Path) -> None:
    """A source file is a page that shows it, a folder a list; files of a former run are gone."""
    for folder in ("docs", "parts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "parts/one.md").write_text("# 1. One\n")
    (tmp_path / "docs/old.png").write_bytes(b"\x89PNG")
    (tmp_path / "docs/site.css").write_text("")
    (tmp_path / "tool.py").write_text("print()\n")
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "docs/a.md").write_text(
        "<!-- The site has the table of prices here. -->\n# A\n"
        "[t](../tool.py) ![p](old.png) [p](../parts)\n```\n[t](../tool.py)\n```\n"
    )
    site = tmp_path / "site"
    (site / "gone.md").parent.mkdir()
    (site / "gone.md").write_text("")
    SitePages(tmp_path, {"docs/made.md": "# Made\n[a](a.md)\n"}, {"prices": "| 1 |"}).add_all().write(site)
    assert (site / "docs/a.md").read_text() == (
        "| 1 |\n# A\n[t](../tool.py.md) ![p](old.png) [p](../parts/index.md)\n```\n[t](../tool.py)\n```\n"
    )
    assert "print()" in (site / "tool.py.md").read_text()
    assert (site / "docs/old.png").read_bytes() == b"\x89PNG"
    assert (site / "docs/made.md").read_text() == "# Made\n[a](a.md)\n"
    assert (site / "parts/index.md").read_text() == "# parts\n\n* [1. One](one.md)\n"
    assert not (site / "gone.md").exists()
