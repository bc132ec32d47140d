"""Pages for users have the words of docs/glossary.md, and none of those that used to stand for them; names likewise."""

from __future__ import annotations

import re

from tests.house.tree import ROOT, read_texts

PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), *ROOT.glob("*.md")]
HISTORY = {"CHANGELOG.md"}
INSTEAD = {
    r"whoever": "anyone who, or the name of who it is",
    r"tells? of": "reports, names",
    r"the house": "what is meant",
    r"(?:far|lower|farther) tiers?": "slower tier",
    r"tiers? below": "slower tier",
    r"below memory": "in a slower tier",
    r"write[- ]down": "write-back",
    r"bring(?:s|ing)? up from": "promote",
}
"""Words to avoid, and those to use instead."""
METAPHORS = re.compile(r"(?<!Key)(?<!Dash)(?:Desk|Office|Board|Book|Mail)(?![a-z])")
"""In names of classes, which say what a thing does."""


def test_pages_have_the_words_of_the_glossary() -> None:
    found = [
        f"{page.relative_to(ROOT)}: {match.group()!r}: {better}"
        for page in PAGES
        if page.name not in HISTORY
        for word, better in INSTEAD.items()
        for match in re.finditer(rf"\b{word}\b", page.read_text(), flags=re.IGNORECASE)
    ]
    assert found == []


def test_no_class_is_named_by_a_metaphor() -> None:
    """Neither in Python nor in C++: a desk, an office or a book could be anything."""
    found = [
        f"{file}: {name}"
        for file, text in read_texts().items()
        if file.parts[0] in ("kvoffload", "native") and file.suffix in (".py", ".hpp", ".cpp")
        for name in re.findall(r"^\s*(?:class|struct) (\w+)", text, flags=re.MULTILINE)
        if METAPHORS.search(name)
    ]
    assert found == []
    assert METAPHORS.search("InsightDesk")
    assert not METAPHORS.search("Keyboard")


def test_the_glossary_is_in_order_and_says_each_word_once() -> None:
    words = re.findall(r"^\* \*\*(.+?)\*\*: .", (ROOT / "docs/glossary.md").read_text(), flags=re.MULTILINE)
    assert words == sorted(set(words), key=str.casefold)
    assert len(words) > 30
