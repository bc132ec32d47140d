"""Habits that make a reader of plain English stop, and the texts in which they are looked for.

A text is a docstring, the string below an attribute, a comment, or a sentence of a page.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FRAGMENT = re.compile(
    r"(Of|That|Whose|Which|By|At|With|From|To|Than|As|In|On|Beside|Beyond|Likewise|Else|None|So|Until)\b"
    r"(?![^.]{3,60}, )"
)
FREE_RELATIVE = re.compile(r"(What|Who|Whoever|Whatever)\b(?!.*\?)")
BARE_VERB = re.compile(r"(Is|Are|Has|Says|Tells)\b")
WORDS = re.compile(
    r"\b(whoever|Whoever|[Ss]omebody|[Nn]obody|[Aa]nybody|reckons?|beside(?!s)|anew|is to be|are to be|has it not"
    r"|once more does)\b"
)
SHORTEST_COMMENT = 15
"""Comments up to this length are marks, such as `# noqa`."""
SHORTEST_SENTENCE = 20
"""Pieces of a page up to this length are headings or items of lists."""
SENTENCE_END = re.compile(r"(?<=[.!?])\s")
NATIVE = {".hpp", ".cpp", ".cu", ".cuh"}


@dataclass(frozen=True)
class Text:
    """A text of one file."""

    file: Path
    line: int
    words: str
    is_doc: bool
    """Whether the text describes a name: such a text must be understood without the name."""

    @property
    def room(self) -> str:
        """The folder whose texts are counted together: the first two parts of the path."""
        return "/".join(self.file.parts[:2] if len(self.file.parts) > 2 else self.file.parts[:1])

    def find_habit(self) -> str | None:
        """Returns the first habit of the text with the way out of it, or None."""
        first = SENTENCE_END.split(" ".join(self.words.split()))[0]
        if self.is_doc and FRAGMENT.match(first):
            return "starts as the end of a sentence: write a whole one"
        if FREE_RELATIVE.match(first):
            return "has 'what ...' or 'who ...' as its subject: name the thing"
        if self.is_doc and BARE_VERB.match(first):
            return "starts with a verb without a subject: name the thing"
        if found := WORDS.search(self.words):
            return f"says {found[0]!r}: name the actor, or use the everyday word"
        return None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.words.split())[:100]}"


def find_texts(file: Path, content: str) -> Iterator[Text]:
    """Finds the texts of a file. A file of a kind that is not known has none."""
    if file.suffix == ".py":
        yield from _find_in_python(file, content)
    elif file.suffix == ".md":
        yield from _find_in_page(file, content)
    elif file.suffix in NATIVE:
        yield from _find_in_native(file, content)


def _find_in_python(file: Path, content: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if doc := ast.get_docstring(node):
                yield Text(file, getattr(node, "lineno", 1), doc, is_doc=True)
            for attribute, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(attribute, ast.Assign | ast.AnnAssign) and isinstance(text, ast.Expr):
                    value = text.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield Text(file, text.lineno, value.value, is_doc=True)
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT and len(token.string) > SHORTEST_COMMENT:
            yield Text(file, token.start[0], token.string.lstrip("#: "), is_doc=False)


def _find_in_native(file: Path, content: str) -> Iterator[Text]:
    block: list[str] = []
    for number, line in enumerate([*content.splitlines(), ""], 1):
        text = line.strip()
        if text.startswith("//"):
            block.append(text.lstrip("/< "))
        elif block:
            yield Text(file, number - len(block), " ".join(block), is_doc=True)
            block = []


def _find_in_page(file: Path, content: str) -> Iterator[Text]:
    # Lines of code are blanked, so that the numbers of the other lines stay.
    plain = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), content, flags=re.DOTALL)
    for number, line in enumerate(plain.splitlines(), 1):
        if not line.lstrip().startswith(("|", "#", "!")):
            for sentence in SENTENCE_END.split(line.strip("*- ")):
                if len(sentence) > SHORTEST_SENTENCE:
                    yield Text(file, number, sentence, is_doc=False)
