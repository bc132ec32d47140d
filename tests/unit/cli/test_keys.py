"""`kvoffload keys`: what it writes and prints."""

from __future__ import annotations

from pathlib import Path

from tests.kit.cli.commands import run


def test_a_new_pair_is_shown_and_not_overwritten(tmp_path: Path) -> None:
    done = run("keys", "new", str(tmp_path / "me"))
    assert done.returncode == 0
    line, key = done.stdout.splitlines()
    assert line == f"secret key in {tmp_path}/me.key, public key in {tmp_path}/me.pub:"
    for suffix in (".key", ".pub"):
        shown = run("keys", "show", str(tmp_path / f"me{suffix}"))
        assert (shown.returncode, shown.stdout) == (0, key + "\n")
    again = run("keys", "new", str(tmp_path / "me"))
    assert again.returncode == 2
    remedy = "choose another name, or remove it first"
    assert again.stderr == f"kvoffload: key file {tmp_path}/me.key exists already; {remedy}\n"


def test_a_key_that_seals_is_made_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "seal"
    for says in ("1 key", "2 keys"):
        done = run("keys", "seal", str(file))
        assert (done.returncode, done.stdout) == (0, f"{file} has {says}, of which the first seals new records\n")
    refused = run("keys", "seal", str(tmp_path))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"kvoffload: key file {tmp_path} is no file; ")
