"""Memory of former servers that engines still have: what it keeps this one from taking, and who may let go of it."""

from __future__ import annotations

import numpy as np

from kvoffload.protocol import Holding, Retire, Role
from kvoffload.server.sessions.outbox import ToLifeline
from kvoffload.server.sessions.session import EngineSession


def hear_holding(session: EngineSession, lifeline: int, message: Holding) -> list[ToLifeline]:
    """Notes which memories a process of the session has now. Returns the requests to send to processes that should let
    go of some."""
    process = session.processes[lifeline]
    before = process.former or {}
    process.former = {one.memory: one.size_bytes for one in message.memories}
    session.domain.former.change(before, process.former)
    # It may have heard this while it could not act on it.
    process.asked = frozenset()
    return _ask_for_release(session) if session.cache_session is not None else []


def _ask_for_release(session: EngineSession) -> list[ToLifeline]:
    """Asks workers for what their scheduler holds nothing in: they do not know that by themselves, and it lets go of
    what it does not use without being asked."""
    schedulers = [one.former for one in session.processes.values() if one.role is Role.SCHEDULER]
    used: set[int] = set()
    for former in schedulers:
        if former is None:
            return []
        used.update(former)
    if not schedulers:
        return []
    sent = []
    for process in session.processes.values():
        unused = frozenset(process.former or ()) - used
        if process.role is Role.WORKER and unused - process.asked:
            process.asked = unused
            sent.append(ToLifeline(process.lifeline, Retire(memories=np.array(sorted(unused), "<u8").tobytes())))
    return sent
