"""Every request over HTTP is answered as the OpenAPI document says: schemathesis asks a real process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvoffload.cli.web import MIN_TOKEN_LETTERS
from tests.kit.cli.web_process import get, web
from tests.kit.server.tiers import await_that, serving

EXAMPLES = 100
"""Number of requests to each path and method."""
_RUN = "from schemathesis.cli import schemathesis; schemathesis()"


def test_every_answer_is_what_the_document_says(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * MIN_TOKEN_LETTERS)
    token.chmod(0o600)
    with serving(tmp_path / "s") as server, web(tmp_path / "s", f"http_token_file={token}") as address:
        await_that(lambda: get(f"{address}/readyz")[0] == 200)
        command = [sys.executable, "-c", _RUN, "run", f"{address}/openapi.json", "--checks", "all", "--mode", "all"]
        command += ["--max-examples", str(EXAMPLES), "--seed", "1", "--no-color", "--workers", "1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Tested: 15" in done.stdout, done.stdout
        assert get(f"{address}/readyz")[0] == 200
        assert server.has_memory
