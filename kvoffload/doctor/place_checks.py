"""Whether a server answers, and the stores below it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvoffload.client.client import Client
from kvoffload.client.inspector import Inspector, Row
from kvoffload.client.joining import Member
from kvoffload.client.settings import ClientSettings, LinkState
from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.given import NOTHING, Given
from kvoffload.errors import ServerError, TierError
from kvoffload.protocol import ErrorCode, Role
from kvoffload.server.tiering.settings import TierPlan
from kvoffload.tiers.base import TierState
from kvoffload.tiers.remote import RemotePlace
from kvoffload.units import describe_size

ANSWER_S = 5.0
ABSENT_S = 0.5
_LET_IN = "run as that user or in that group, or start the server with --set socket_mode=0660 --set socket_group=..."


def check_server(socket: str, given: Given = NOTHING) -> Finding:
    """Joins a server as an observer, which takes nothing of it. A server that is not there is not waited for."""
    if not socket:
        return ok("server", "none is set: each engine starts one of its own")
    client = Client(ClientSettings(socket=Path(socket), member=Member(engine="doctor", role=Role.OBSERVER))).start()
    try:
        is_served = client.wait_until_served(ABSENT_S)
        if not is_served and (client.link.state is LinkState.DOWN or not client.wait_until_served(ANSWER_S)):
            return fail(
                "server", client.fault or f"{socket} does not answer", _mend_server(Path(socket), client, given)
            )
        stats = client.stats()
    except ServerError as fault:
        # It has let us in, and may still be taking its memory, which lasts seconds for each 100 GB.
        return warn("server", f"{socket}: {fault.message}", given.command("doctor", server=socket))
    finally:
        client.close()
    used = f"{describe_size(stats.used_bytes)} of {describe_size(stats.capacity_bytes)} used"
    told = f"{socket}: {used}, {stats.sessions} sessions"
    opening, ready = TierState.OPENING.value, TierState.READY.value
    bad = [place for place in stats.places if place.state != opening and (place.state != ready or place.reason)]
    if not bad:
        return ok("server", told)
    faults = "; ".join(f"{place.tier} tier {place.name} is {place.state}: {place.reason}" for place in bad)
    return warn("server", f"{told}; {faults}", "repair the named tier: the server looks again by itself")


def check_shapes(socket: str) -> Iterator[Finding]:
    """Yields how the engines of a server divide their blocks. Only its operator is told."""
    if not socket:
        return
    with Client(ClientSettings(socket=Path(socket), member=Member(engine="doctor", role=Role.OBSERVER))) as client:
        if not client.wait_until_served(ABSENT_S):
            return
        with contextlib.suppress(ServerError):
            inspector = Inspector(client.look_into)
            for line in inspector.survey_engines().find_differing():
                yield warn("engines", f"share no blocks: {line}", "start them with the same settings")
            for row in inspector.list_identities():
                if row["ranks"]:
                    yield ok("shape", describe_shape(row))


def describe_shape(row: Row) -> str:
    """Describes an identity's ranks and in how many parts they keep a block, by group."""
    parts: dict[int, list[int]] = {}
    for number, group in enumerate(row["groups"]):
        parts.setdefault(group["shards"], []).append(number)
    kept = "; ".join(
        f"{count} {'part' if count == 1 else 'parts'}"
        + (f" (group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))})" if len(parts) > 1 else "")
        for count, groups in parts.items()
    )
    ranks = row["ranks"]
    name = f"{row['made_of'].get('model', '')} {row['identity']}".strip()
    return f"{name}: {ranks} {'rank' if ranks == 1 else 'ranks'}, a block is kept in {kept}"


def check_stores(plans: Sequence[TierPlan], timeout_s: float) -> Iterator[Finding]:
    """Checks the tiers that other machines use too, each by a connection of its own."""
    for plan in plans:
        if isinstance(plan.place, RemotePlace):
            yield check_store(plan.settings.name, plan.place, timeout_s)


def check_store(check: str, place: RemotePlace, timeout_s: float) -> Finding:
    where = place.describe()
    tier = place.open_tier()
    try:
        tier.wait_open(ANSWER_S + timeout_s)
        health = tier.health()[0]
    finally:
        with contextlib.suppress(TierError):  # it hangs, which is what is told
            tier.close(timeout_s)
    if health.state is not TierState.READY:
        return fail(check, f"{where}: {health.reason}", place.find_remedy(health.reason))
    return ok(check, f"{where}: answers")


def _mend_server(socket: Path, client: Client, given: Given) -> str:
    """Why it is not there is looked at again: the client tells it in words."""
    if client.link.refusal is not None and client.link.refusal.code is ErrorCode.VERSION:
        return "install one version of kvoffload here and where the server runs"
    try:
        is_there = socket.exists()
    except PermissionError:
        return _LET_IN
    if is_there and not socket.is_socket():
        return "name another path in `server`"
    if is_there and not os.access(socket, os.W_OK, effective_ids=True):
        return _LET_IN
    if is_there and client.link.state is not LinkState.DOWN:
        return "end the server's process, and start it again"
    return given.command("serve", server=str(socket))
