"""A real browser, Debian's chromium, driven over a pipe by its own debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiers.valkey_server import DEBIAN, LIBRARIES

WAIT_S = 60.0
_BINARY = DEBIAN / "usr" / "lib" / "chromium" / "chromium-headless-shell"


class Browser:
    """One page at a time. Whatever the page complains about is kept in `complaints`."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self.complaints: list[str] = []
        self._process = process
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._unread = b""
        self._number = 0
        self._session = ""

    def open(self, address: str) -> None:
        """A new page, until it has loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Waits until an expression in the page is true."""
        end_s = time.monotonic() + WAIT_S
        while not self.run(condition):
            assert time.monotonic() < end_s, f"not so after {WAIT_S:g} s: {condition}"
            time.sleep(0.05)

    def look_like(self, *, width: int, height: int = 900, scheme: str = "light", is_phone: bool = False) -> None:
        """How large the window is, and which colours the user likes."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def photograph(self, file: Path, **options: Any) -> None:
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", **options)["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(event["params"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._from_browser], [], [], WAIT_S)[0], "the browser does not answer"
            came = os.read(self._from_browser, 1 << 20)
            assert came, f"the browser has ended: {self._process.poll()}"
            self._unread += came
        line, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(line))


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Skips where Debian's packages are not to be had."""
    if not _BINARY.exists():
        pytest.skip("chromium is missing: Debian's packages were not to be had at set-up")
    reads, writes = os.pipe(), os.pipe()
    # The browser reads from 3 and writes to 4.
    begin = ["bash", "-c", f'exec "$0" "$@" 3<&{reads[0]} 4>&{writes[1]}', str(_BINARY)]
    options = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{LIBRARIES}:{LIBRARIES / 'pulseaudio'}", "HOME": str(folder)}
    with subprocess.Popen(
        [*begin, *options, "--remote-debugging-pipe"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(reads[0], writes[1]),
    ) as process:
        os.close(reads[0])
        os.close(writes[1])
        try:
            yield Browser(process, reads[1], writes[0])
        finally:
            process.kill()
            os.close(reads[1])
            os.close(writes[0])


WIDTHS = (1440, 1024, 390)
