"""The command of docs/monitoring.md that asks where a prompt is, as a reader types it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvoffload.cli.web import MIN_TOKEN_LETTERS
from tests.house.tree import ROOT
from tests.kit.cli.web_process import get, web
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.prompt_load import PromptLoad


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_it_is_answered(tmp_path: Path) -> None:
    [command] = re.findall(r"^curl .*?/v1/prefix$", (ROOT / "docs/monitoring.md").read_text(), re.M | re.S)
    token = tmp_path / "token"
    token.write_text("x" * MIN_TOKEN_LETTERS)
    token.chmod(0o600)
    with serving(tmp_path / "s") as server, web(tmp_path / "s", f"http_token_file={token}") as address:
        await_that(lambda: server.has_memory)
        await_that(lambda: get(f"{address}/readyz")[0] == 200)
        load = PromptLoad(tmp_path / "s")
        typed = f"TOKEN={token.read_text()}; " + command.replace("http://127.0.0.1:9470", address)
        done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, timeout=60, check=True)
        load.close()
    [row] = json.loads(done.stdout)["identities"]
    assert (row["model"], row["asked_tokens"], row["hit_tokens"]) == ("made-up/model-8b", 4, 0)
    assert row["reaches"] == {"memory": 0}
