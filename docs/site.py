"""Lays out the pages of the site in build/site-pages, from the files of this tree: `make docs-site` builds them.

Some pages are made from code here and are no files of the tree (`render_site_pages`); other pages leave places for
tables that are made from code (`render_tables`).

Pages keep their places, README.md is the first one. What they link to besides is laid out too: a source file as a page
that shows it, a folder as a list of what is in it. So every link leads somewhere without a network.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from docs.generate import fill_places, render_site_pages, render_tables

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "site-pages"
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
STYLE = "docs/site.css"
AS_THEY_ARE = {".png", ".webp", ".svg", ".json"}
"""Files that a browser shows, or that are too long for a page."""

_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".service": "ini"}
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


class SitePages:
    """The pages as they are written, by path: each once, with all that it links to."""

    def __init__(
        self, root: Path = ROOT, made: Mapping[str, str] | None = None, tables: Mapping[str, str] | None = None
    ) -> None:
        self._root = root
        self._made = made or {}
        self._tables = tables or {}
        self.texts: dict[str, str] = {}
        self.copies: set[str] = set()

    def add_all(self) -> SitePages:
        for name in TOP:
            self._add_page(name)
        written = [file.relative_to(self._root).as_posix() for file in (self._root / "docs").rglob("*.md")]
        for path in sorted([*written, *self._made]):
            self._add_page(path)
        self.copies.add(STYLE)
        return self

    def write(self, folder: Path) -> None:
        """Removes what was written before, so that no page is published that does not exist any more."""
        shutil.rmtree(folder, ignore_errors=True)
        for path, text in self.texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        for path in self.copies:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._root / path, folder / path)

    def _add_page(self, path: str) -> None:
        if path in self.texts:
            return
        self.texts[path] = ""  # It may link to itself.
        text = self._made[path] if path in self._made else fill_places((self._root / path).read_text(), self._tables)
        here = posixpath.dirname(path)
        parts, end = [], 0
        for fence in _FENCE.finditer(text):
            parts += [self._turn_links(text[end : fence.start()], here), fence[0]]
            end = fence.end()
        self.texts[path] = "".join([*parts, self._turn_links(text[end:], here)])

    def _turn_links(self, text: str, here: str) -> str:
        return _LINK.sub(lambda link: self._turn(link[1], here), text)

    def _turn(self, target: str, here: str) -> str:
        """The link as it is on the site, to what is added now if it was not there."""
        if "://" in target or target.startswith("mailto:"):
            return target
        path = posixpath.normpath(posixpath.join(here, target))
        return posixpath.relpath(self._add(path), here or ".")

    def _add(self, path: str) -> str:
        """Returns where it is found on the site."""
        file = self._root / path
        if file.is_dir():
            return self._add_folder(path)
        if file.suffix == ".md":
            self._add_page(path)
            return path
        if file.suffix in AS_THEY_ARE:
            self.copies.add(path)
            return path
        page = f"{path}.md"
        if page not in self.texts:
            language = _LANGUAGES.get(file.suffix, "text")
            self.texts[page] = f"{_NOT_SEARCHED}# {path}\n\n````{language}\n{file.read_text().rstrip()}\n````\n"
        return page

    def _add_folder(self, path: str) -> str:
        page = f"{path}/index.md"
        if page in self.texts:
            return page
        self.texts[page] = f"# {path}\n\n"
        for name in _list_folder(self._root / path):
            there = self._add(f"{path}/{name}")
            self.texts[page] += f"* [{self._find_title(there, name)}]({posixpath.relpath(there, path)})\n"
        return page

    def _find_title(self, page: str, name: str) -> str:
        title = re.search(r"^# (.+)$", self.texts[page], re.MULTILINE) if name.endswith(".md") else None
        return title[1] if title else name


def _list_folder(folder: Path) -> Iterator[str]:
    for file in sorted(folder.iterdir()):
        if not file.name.startswith((".", "__")):
            yield file.name


if __name__ == "__main__":
    SitePages(made=render_site_pages(), tables=render_tables()).add_all().write(
        Path(sys.argv[1]) if len(sys.argv) > 1 else PAGES
    )
