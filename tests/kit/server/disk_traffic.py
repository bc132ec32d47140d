"""Traffic with a disk, step by step."""

from __future__ import annotations

import select
from collections.abc import Callable

from tests.kit.server.tier_setting import TierSetting

STEP_S = 0.001


WAIT_S = 30.0


def await_(setting: TierSetting, is_over: Callable[[], bool]) -> None:
    while not is_over():
        assert select.select([setting.tier], [], [], WAIT_S)[0]
        setting.turn(STEP_S, times=1)


def bring_down(setting: TierSetting, chain: bytes) -> None:
    setting.save(chain)
    setting.turn(STEP_S)
    await_(setting, lambda: setting.traffic.is_idle)
    setting.cache.clear(setting.name_space)


def bring_up(setting: TierSetting, chain: bytes) -> int:
    answers = setting.ask(chain)
    await_(setting, lambda: bool(answers))
    return setting.load(chain)
