"""Why a request's prompt was not restored."""

from __future__ import annotations

from enum import StrEnum


class MissReason(StrEnum):
    """As metrics and log lines say it."""

    NEVER_SEEN = "never_seen"
    TOO_SHORT = "too_short"
    NOT_SERVED = "not_served"
    REFUSED = "refused"
    SLOW_TO_ANSWER = "slow_to_answer"
    NO_ROOM = "no_room"
    SLOWER_THAN_COMPUTING = "slower_than_computing"
    TIER_TOO_SLOW = "tier_too_slow"
    SKIPPED = "skipped"
