"""How a Valkey is reached follows from settings and the files that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.cli.valkey_terms import make_valkey
from kvoffload.config.sources import load_settings
from kvoffload.errors import ConfigError


def test_the_password_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o600)
    flags = {"valkey": "valkey://near", "valkey_password_file": str(file), "valkey_ttl": "1h", "remote_timeout": "2s"}
    settings = load_settings(flags=flags).settings
    terms = make_valkey(settings, "valkey://registry")
    assert (terms.describe(), terms.password, terms.ttl_s, terms.call_timeout_s) == (
        "valkey://registry:6379/0",
        "secret",
        3600,
        2.0,
    )


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret")
    file.chmod(0o644)
    flags = {"valkey": "valkey://near", "valkey_password_file": str(file)}
    with pytest.raises(ConfigError, match="password"):
        make_valkey(load_settings(flags=flags).settings, "valkey://near")
