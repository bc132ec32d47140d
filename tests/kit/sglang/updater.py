"""A stand-in for SGLang's SchedulerWeightUpdaterManager: every change of weights calls one method first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def make_updater_class(on_select: Callable[[str], None] = lambda _: None) -> Any:
    """Makes a new class at each call, because the code that watches it changes it."""

    class Updater:
        __slots__ = ("_session",)

        def __init__(self) -> None:
            self._session: Any = None

        def begin_weight_update(self, recv_req: object) -> None:
            self._select_runners()
            self._session = SimpleNamespace(loaded_weights=False)

        def end_weight_update(self, recv_req: object) -> None:
            self._select_runners()
            self._session = None

        def update_weights_from_tensor(self, recv_req: object) -> list[str]:
            runners = self._select_runners("target")
            if self._session is not None:
                self._session.loaded_weights = True
            return runners

        update_weights_from_disk = update_weights_from_tensor
        update_weights_from_distributed = update_weights_from_tensor
        update_weights_from_ipc = update_weights_from_tensor

        def check_weights(self, recv_req: Any) -> list[str]:
            if recv_req.action == "unknown":
                raise ValueError(recv_req.action)
            return self._select_runners()

        def _select_runners(self, selector: str = "all") -> list[str]:
            on_select(selector)
            return [selector]

    return Updater
