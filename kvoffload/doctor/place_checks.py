"""Whether a server answers, and the stores below it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvoffload.client.client import Client
from kvoffload.client.joining import Member
from kvoffload.client.terms import ClientTerms
from kvoffload.daemon.tier_terms import TierPlan
from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.errors import ServerError, TierError
from kvoffload.protocol import Role
from kvoffload.tiers.base import TierState
from kvoffload.tiers.remote import RemoteTier
from kvoffload.units import format_size

ANSWER_S = 5.0


def check_server(socket: str) -> Finding:
    """As an observer, which takes nothing of it."""
    if not socket:
        return ok("server", "none is set: each engine starts one of its own")
    client = Client(ClientTerms(socket=Path(socket), member=Member(engine="doctor", role=Role.OBSERVER))).start()
    try:
        if not client.wait_until_served(ANSWER_S):
            return fail("server", f"{socket}: {client.fault or 'no answer'}", f"kvoffload serve --set server={socket}")
        stats = client.stats()
    except ServerError as fault:
        # It has let us in, and may still be taking its memory, which lasts seconds for each 100 GB.
        return warn("server", f"{socket}: {fault.message}", f"kvoffload doctor --set server={socket}")
    finally:
        client.close()
    return ok(
        "server",
        f"{socket}: {format_size(stats.used_bytes)} of {format_size(stats.capacity_bytes)} used, "
        f"{stats.sessions} sessions",
    )


def check_stores(plans: Sequence[TierPlan], timeout_s: float) -> Iterator[Finding]:
    """Those that other machines use too, each by a connection of its own."""
    for plan in plans:
        yield check_store(plan, timeout_s)


def check_store(plan: TierPlan, timeout_s: float) -> Finding:
    check, where = plan.terms.name, plan.place.describe()
    tier = plan.place.open_tier()
    assert isinstance(tier, RemoteTier)
    try:
        tier.wait_open(ANSWER_S + timeout_s)
        health = tier.health()[0]
    finally:
        with contextlib.suppress(TierError):  # it hangs, which is what is told
            tier.close(timeout_s)
    if health.state is not TierState.READY:
        return fail(check, f"{where}: {health.reason}", f"kvoffload config show --set {check}=...")
    return ok(check, f"{where}: answers")
