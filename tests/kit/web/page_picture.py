"""Pictures of the page while two made-up models work: `python -m tests.kit.web.page_picture FOLDER [SECONDS]`.

page.webp is what docs/monitoring.md shows; it links the others, widths and colours: page-1440-dark.webp and so on.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from kvoffload.cache import CacheSettings
from kvoffload.server.loop import CacheServer
from kvoffload.server.tiering.settings import TierPlan, TierSettings
from kvoffload.tiers.disk import DiskFolder, DiskSettings
from kvoffload.units import GIB, MIB
from tests.kit.cli.web_process import web
from tests.kit.server.tiers import serving
from tests.kit.web.browser import WIDTHS, Browser, browsing
from tests.kit.web.prompt_load import PromptLoad

WORK_S = 120.0
MEMORY = CacheSettings(memory_bytes=128 * MIB, segment_bytes=64 * MIB)


def main(pictures: Path, work_s: float) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "disk").mkdir(mode=0o700)
        path = folder / "s"
        with serving(path, MEMORY, tiers={"": [below(folder / "disk")]}) as server, web(path) as address:
            loads = work(server, path, work_s)
            with browsing(folder / "browser") as browser:
                browser.open(address)
                take_pictures(browser, pictures)
            for load in loads:
                load.close()


def below(folder: Path) -> TierPlan:
    disk = DiskSettings(folders=[DiskFolder(path=folder, capacity_bytes=GIB)], segment_bytes=16 * MIB)
    return TierPlan(place=disk, settings=TierSettings())


def work(server: CacheServer, path: Path, work_s: float) -> list[PromptLoad]:
    while not server.has_memory:
        time.sleep(0.05)
    loads = [PromptLoad(path, model=model, seed=seed) for seed, model in enumerate(("chat-8b", "code-30b-fp8"))]
    end_s = time.monotonic() + work_s
    while time.monotonic() < end_s:
        for load in loads:
            load.turn(conversations=50)
        time.sleep(0.01)
    return loads


def take_pictures(browser: Browser, pictures: Path) -> None:
    browser.wait_for("Number(document.body.dataset.seen) >= 2 && !!document.querySelector('#tokens polygon')")
    browser.look_like(width=1120)
    browser.look_like(width=1120, height=browser.run("document.documentElement.scrollHeight"))
    browser.photograph(pictures / "page.webp", format="webp", quality=85)
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            browser.look_like(width=width, height=800, scheme=scheme)
            browser.look_like(width=width, height=browser.run("document.documentElement.scrollHeight"), scheme=scheme)
            browser.wait_for("document.querySelector('#tokens svg').clientWidth <= innerWidth")
            browser.photograph(pictures / f"page-{width}-{scheme}.webp", format="webp", quality=85)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else WORK_S)
