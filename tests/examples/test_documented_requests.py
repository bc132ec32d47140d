"""Requests that pages send with curl, as a reader types them, and answers that the pages show, but for figures."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from kvoffload.cli.web import MIN_TOKEN_LETTERS
from tests.house.commands import BLOCKS, Block
from tests.kit.cli.web_process import get, web
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.prompt_load import PromptLoad

REQUESTS = [(block, after) for block, after in pairwise(BLOCKS) if block.text.startswith("curl ")]
TOKEN = "x" * MIN_TOKEN_LETTERS
OF_THIS_SERVER = ("identity", "outcome", "reaches")
"""Fields whose values depend on what the server has, with more than figures."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server with one identity is asked over HTTP."""
    folder = tmp_path_factory.mktemp("requests")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with serving(folder / "s") as server, web(folder / "s", f"http_token_file={token}") as address:
        await_that(lambda: server.has_memory)
        await_that(lambda: get(f"{address}/readyz")[0] == 200)
        load = PromptLoad(folder / "s")
        yield address
        load.close()


def without_figures(value: Any) -> Any:
    """The answer with 0 for each number, and without what depends on the server."""
    match value:
        case dict():
            return {name: without_figures(one) for name, one in value.items() if name not in OF_THIS_SERVER}
        case list():
            return [without_figures(one) for one in value]
        case bool() | str():
            return value
        case _:
            return 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("block", "after"), REQUESTS, ids=[str(block)[:40] for block, _ in REQUESTS])
def test_it_is_answered_as_the_page_shows(address: str, block: Block, after: Block) -> None:
    typed = f"TOKEN={TOKEN}; " + block.text.replace("http://127.0.0.1:9470", address)
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    if "/v1/sessions" in typed:
        assert answer == {"sessions": []}
        return
    assert after.page == block.page
    assert without_figures(answer) == without_figures(json.loads(after.text))


def test_there_are_requests_of_three_kinds() -> None:
    assert len(REQUESTS) == 3
