"""Slower tiers, as files to copy: 04_disk_and_remote.toml; and a fleet on one machine: 05_fleet/run.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvoffload.cli.below import choose_tiers
from kvoffload.cli.fleet import plan_fleet
from kvoffload.cli.serve import read_tables
from kvoffload.config.sources import load_settings
from kvoffload.key_files import write_new_pair
from tests.examples.serve import EXAMPLES


def test_the_fleet_runs() -> None:
    command = [sys.executable, str(EXAMPLES / "05_fleet/run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens and logprobs equal, every bit: yes" in done.stdout
    # One machine is there before the other, and one goes.
    told = "the cache server warns: peer tier "
    assert [line for line in done.stderr.splitlines() if not line.startswith(told)] == []


def test_the_file_with_disk_and_remote_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    password = tmp_path / "valkey.password"
    password.write_text("secret")
    password.chmod(0o600)
    text = (EXAMPLES / "04_disk_and_remote.toml").read_text()
    assert "/keys/valkey.password" in text
    file.write_text(text.replace("/keys/valkey.password", str(password)))
    settings = load_settings(file=file).settings
    disk, valkey = choose_tiers(settings, read_tables(file))[""]
    assert disk.place.describe() == "2TiB of disk in 2 folders"
    assert valkey.place.describe() == "valkeys://kvoffload@store.example:6379/0"


def test_the_file_of_a_fleet_is_accepted_with_real_keys(tmp_path: Path) -> None:
    text = (EXAMPLES / "05_fleet/fleet.toml").read_text()
    for at in (1, 2, 3):
        key = write_new_pair(tmp_path / f"key{at}")[1].read_text().split()[-1]
        place = f"<the public key of 10.0.0.{at}>"
        assert place in text
        text = text.replace(place, key)
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    flags = {"listen": "tcp://10.0.0.1:5555", "key_file": str(tmp_path / "key1.key")}
    fleet = plan_fleet(load_settings(file=file, flags=flags).settings, read_tables(file))
    assert fleet is not None
    assert fleet.place.describe() == "2 peers"
    assert fleet.peering.is_sealed
