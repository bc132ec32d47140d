"""A picture of the page while two made-up models work: `python -m tests.unit.web.page_picture FILE.png`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from kvoffload.cache import CacheTerms
from kvoffload.daemon.server import CacheServer
from kvoffload.daemon.tier_terms import TierPlan, TierTerms
from kvoffload.tiers.disk import DiskFolder, DiskTerms
from kvoffload.units import GIB, MIB
from tests.unit.cli.test_web import web
from tests.unit.daemon import test_server_tiers
from tests.unit.daemon.test_server_tiers import serving
from tests.unit.web.browser import browsing
from tests.unit.web.prompt_load import PromptLoad

WORK_S = 120.0
MEMORY = CacheTerms(memory_bytes=128 * MIB, segment_bytes=64 * MIB)


def main(picture: Path) -> None:
    test_server_tiers.MEMORY = MEMORY
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "disk").mkdir(mode=0o700)
        path = folder / "s"
        with serving(path, tiers={"": [below(folder / "disk")]}) as server, web(path) as address:
            take_picture(server, path, address, folder, picture)


def below(folder: Path) -> TierPlan:
    disk = DiskTerms(folders=[DiskFolder(path=folder, capacity_bytes=GIB)], segment_bytes=16 * MIB)
    return TierPlan(place=disk, terms=TierTerms())


def take_picture(server: CacheServer, path: Path, address: str, folder: Path, picture: Path) -> None:
    while not server.has_memory:
        time.sleep(0.05)
    loads = [PromptLoad(path, model=model, seed=seed) for seed, model in enumerate(("chat-8b", "code-30b-fp8"))]
    end_s = time.monotonic() + WORK_S
    while time.monotonic() < end_s:
        for load in loads:
            load.turn(conversations=50)
        time.sleep(0.01)
    with browsing(folder / "browser") as browser:
        browser.open(address)
        browser.look_like(width=1120, height=1060)
        browser.wait_for("Number(document.body.dataset.seen) >= 2 && !!document.querySelector('#tokens polygon')")
        browser.photograph(picture)
    for load in loads:
        load.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
