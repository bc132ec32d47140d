"""A server's drain: it takes nothing new, and ends when nothing is held any more or at the deadline."""

from __future__ import annotations

import hmac

from kvoffload.protocol import ClientMessage, Error, ErrorCode
from kvoffload.server.common.refusal import refuse
from kvoffload.server.sessions.session import EngineSession
from kvoffload.server.sessions.settings import CoreSettings

_NS_PER_MS = 1_000_000


class DrainState:
    """Belongs to the thread of the server's core. Once on, it is not taken back."""

    def __init__(self) -> None:
        self.is_on = False
        self._deadline_ns = 0

    def start(self, now_ns: int, deadline_ms: int) -> bool:
        """Begins the drain, and returns whether it had not begun before. A later call can only bring the deadline
        forward; 0 means no deadline."""
        if deadline_ms:
            deadline_ns = now_ns + deadline_ms * _NS_PER_MS
            self._deadline_ns = min(self._deadline_ns or deadline_ns, deadline_ns)
        began = not self.is_on
        self.is_on = True
        return began

    def is_over(self, now_ns: int, *, holds_something: bool) -> bool:
        """Whether the drain has ended: nothing is held any more, or the deadline has passed."""
        is_late = 0 < self._deadline_ns <= now_ns
        return self.is_on and (is_late or not holds_something)


def is_operator(settings: CoreSettings, session: EngineSession) -> bool:
    """Whether the session is an operator's by its user or key alone."""
    return session.uid in settings.operator_uids if session.guest is None else session.guest.is_operator


def check_operator(settings: CoreSettings, session: EngineSession, message: ClientMessage) -> Error | None:
    """Returns a refusal if the message is for operators only and the caller is none."""
    return check_stranger(settings, session, message) if message.is_for_operators else None


def check_stranger(settings: CoreSettings, session: EngineSession, message: ClientMessage) -> Error | None:
    """Returns a refusal if the caller is no operator and does not know the token."""
    token, told = settings.operator_token, getattr(message, "token", "")
    if token and hmac.compare_digest(told.encode(), token.encode()):
        return None
    if is_operator(settings, session):
        return None
    who = f"user {session.uid}" if session.guest is None else "who comes over TCP with this key"
    return refuse(message, ErrorCode.NOT_ALLOWED, f"{who} is no operator here")
