"""Handles faults of the server itself: one traceback in the log, and an error as the answer to the request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvoffload.protocol import ClientMessage, Error, ErrorCode
from kvoffload.server.common.refusal import refuse

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


class FaultLog:
    """Belongs to the thread of the server's core. A fault that stays would fill the log, so each kind of fault of an
    operation is logged the first time only."""

    def __init__(self) -> None:
        self.logged: set[tuple[str, type[Exception]]] = set()

    def attempt(self, operation: str, act: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | Exception:
        """Returns what `act` returns, or the exception that it raised."""
        try:
            return act(*given, **named)
        except Exception as fault:
            if (operation, type(fault)) not in self.logged:
                self.logged.add((operation, type(fault)))
                log.exception("%s met a fault; the server goes on", operation)
            return fault

    def serve(self, message: ClientMessage, act: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | Error:
        """Returns what `act` returns, or the error INTERNAL."""
        found = self.attempt(type(message).__name__, act, *given, **named)
        if isinstance(found, Exception):
            return refuse(message, ErrorCode.INTERNAL, f"{type(found).__name__}: {found}")
        return found
