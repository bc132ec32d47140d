"""Clients of real servers in this process."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from kvoffload.client import Client
from tests.unit.client.conftest import make_settings

WAIT_S = 30.0


def served(path: Path, **options: Any) -> Client:
    client = Client(make_settings(path, **options)).start()
    assert client.wait_until_served(WAIT_S), client.fault
    return client


def find_servers(room: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"server={room}".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def wait_for(condition: Any) -> Any:
    """Waits until it gives something true, and returns that."""
    gate = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        found = condition()
        if found:
            return found
        gate.wait(0.01)
    raise AssertionError("it did not come true")
