"""The table of docs/models.md, from the answers of vLLM and of the connector: `python -m tests.kit.plan.page` writes
it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from docs.table import render_table
from kvoffload.errors import ConfigError
from kvoffload.plan.model_shape import Keeps, ModelShape, ShapeSettings, read_shape
from kvoffload.plan.sizing import size_model
from tests.kit.plan.asked import Answer, ask_all
from tests.kit.plan.gallery import GALLERY, Model

PAGE = Path(__file__).parents[3] / "docs/models.md"
BEGIN = "<!-- Made by tests/kit/plan/page.py; `make gallery` rewrites it. -->"
END = "<!-- The end of the table. -->"
COLUMNS = ["model", "config", "groups", "bytes a token", "at each end of a hit", "kept", "plan"]


def render_page(page: str, answers: Mapping[str, Answer]) -> str:
    """Renders the table into a page that is written by hand."""
    before, _, behind = page.partition(BEGIN)
    _, _, after = behind.partition(END)
    rows = [_row(name, model, answers[name]) for name, model in GALLERY.items()]
    return "\n".join([f"{before}{BEGIN}", "", *render_table(COLUMNS, rows), "", f"{END}{after}"])


def _row(name: str, model: Model, answer: Answer) -> list[str]:
    shape = ModelShape(model_type=name, layers=answer.layers, max_tokens=0)
    sizing = size_model(shape)
    dtype = "" if answer.kv_dtype == "auto" else f" (`{answer.kv_dtype}`)"
    return [
        name,
        model.publisher,
        ", ".join(_groups(answer)),
        f"{sizing.token_bytes:,}{dtype}",
        f"{sizing.end_bytes(1 << 62):,}" if any(one.keeps is not Keeps.TOKENS for one in answer.layers) else "",
        _kept(answer),
        _plan(model),
    ]


def _groups(answer: Answer) -> Iterator[str]:
    """Groups that are alike, as `3 of windows (16)`: how many, of what, and the tokens of a block."""
    alike: dict[str, int] = {}
    for group in answer.groups:
        what = f"{group.what} ({group.block_size:,})"
        alike[what] = alike.get(what, 0) + 1
    for what, number in alike.items():
        yield what if number == 1 else f"{number} of {what}"


def _kept(answer: Answer) -> str:
    if answer.refused:
        return "no: the connector refuses it"
    left = dict.fromkeys(group.what for group in answer.groups if not group.prefix_cacheable)
    return f"all but {' and '.join(left)}" if left else "all"


def _plan(model: Model) -> str:
    try:
        read_shape(model.asked, ShapeSettings())
    except ConfigError:
        return "`--exact`"
    return "yes"


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(), ask_all()))
