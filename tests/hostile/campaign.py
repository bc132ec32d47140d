"""Rounds that a seed decides: a server, who attacks it, and what the honest user found meanwhile."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.hostile.ground import (
    DOMAINS,
    HONEST,
    HOSTILE,
    LIMITS,
    START_S,
    STORES,
    Ground,
    Setup,
    Watched,
    describe,
    open_ground,
    read_json,
    read_line,
    started,
)
from tests.hostile.user import KINDS

ALONE, BUSY = "alone", "busy"
"""Rounds without a hostile user: one with no other process, and one with processes that only compute."""
BUSY_PROCESSES, BUSY_EVERY = 3, 12
ONLY_TWO_DOMAINS = ("writes",)
"""Kinds that any user may do to the memory of its own domain."""
TENANTS = {
    "two domains": {"loads": "", "newcomers": ""},
    "one domain": {"loads": "kept", "newcomers": "kept", "streams": "stream"},
}
"""Roles of the honest user's processes, with their tenants."""
MOST_KINDS = 3
ROUND_S = 6.0
PATIENCE_S = 120.0
"""For so long the honest processes may take to say what they found."""
GRACE_S = 10.0
MORE_THAN_BUSY = 2.0
"""A time is only too long if it is so many times the longest of the round with computing processes: that tells how busy
the machine is."""
GROWTH_BYTES = 1 << 30
"""Memory that one user may make the server keep: the bounds of docs/security.md, all together."""
STARTS = "the server starts and serves the honest user"
SERVED = "the honest user is served in the end"
NOT_WRONG = "no wrong byte is read"
NOT_LOST = "no block is lost"
LIVES = "nobody ends the server"
IS_BOUNDED = "the server's memory is bounded"
HAS_NO_FAULT = "nothing is a fault of the server's own"
ON_ANY_MACHINE = (SERVED, NOT_WRONG, NOT_LOST, LIVES, IS_BOUNDED, HAS_NO_FAULT)
"""Promises that do not depend on how fast the machine is."""
_COMPUTE = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""Computes for as long as the campaign lives."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: `number` and the campaign's seed decide everything else."""

    seed: int
    number: int
    setup: Setup = field(default_factory=Setup)
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A promise that was broken, and when: seconds from the beginning of the round."""

    at: Round
    second: float
    promise: str
    found: str


@dataclass(kw_only=True)
class Outcome:
    """The findings of one round."""

    at: Round
    begun_s: float
    roles: dict[str, Any] = field(default_factory=dict)
    """Findings of each process of the honest user (`honest.Found`), by its role. None: it told none."""
    done: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts of what each hostile user did."""
    watched: Watched = field(default_factory=Watched)
    faults: int = 0
    """Tracebacks in the server's log."""

    def values(self, role: str, name: str) -> list[tuple[float, Any]]:
        return list((self.roles.get(role) or {}).get(name, ()))


Ended = Sequence[tuple[Outcome, list[Broken]]]
"""Rounds, and what each of them broke."""


def draw_rounds(seed: int) -> Iterator[Round]:
    """Rounds without end. All kinds have been dealt before one comes again; every second round has one kind alone. How
    busy the machine is may change, so that the round with computing processes comes again."""
    yield Round(seed=seed, number=0, kinds=(ALONE,))
    chance, deck, stores = Random(seed), [], []
    for number in count(1):
        if number % BUSY_EVERY == 1:
            yield Round(seed=seed, number=number, kinds=(BUSY,))
            continue
        how_many = chance.randint(2, MOST_KINDS) if number % 2 else 1
        kinds: list[str] = []
        while len(kinds) < how_many:
            deck = deck or chance.sample(list(KINDS), len(KINDS))
            kinds.append(deck.pop())
        domains = DOMAINS[0] if set(kinds) & set(ONLY_TWO_DOMAINS) else chance.choice(DOMAINS)
        store = ""
        if domains == "one domain":
            stores = stores or chance.sample(STORES, len(STORES))
            store = stores.pop()
        limit = chance.choice(LIMITS) if chance.random() < 0.5 else ""
        setup = Setup(domains=domains, store=store, limit=limit)
        yield Round(seed=seed, number=number, setup=setup, kinds=tuple(kinds))


def run_round(at: Round, seconds: float = ROUND_S, grace_s: float = GRACE_S) -> Outcome:
    """`grace_s`: how long hostile users may take to end what they do, before they are killed."""
    with tempfile.TemporaryDirectory() as folder, open_ground(Path(folder), at.setup, at.seed + at.number) as ground:
        with ExitStack() as running:
            honest = {}
            for role, tenant in TENANTS[at.setup.domains].items():
                words = [role, ground.place.socket, str(HONEST), tenant]
                honest[role] = running.enter_context(started(["-m", "tests.hostile.honest", *words]))
            for process in honest.values():
                assert read_line(process, START_S) == "ready\n", "the honest user is not served"
            begun = time.monotonic()
            attackers = [(kind, running.enter_context(attacking(kind, at, ground, seconds))) for kind in at.kinds]
            time.sleep(seconds)
            done = {kind: Counter(read_json(process, grace_s) or {}) for kind, process in attackers}
            for process in honest.values():
                assert process.stdin is not None
                with contextlib.suppress(OSError):
                    process.stdin.write("end\n")
                    process.stdin.flush()
            end = time.monotonic() + PATIENCE_S
            found = {role: read_json(process, end - time.monotonic()) for role, process in honest.items()}
        faults = ground.read_log().count("Traceback (most recent call last)")
    return Outcome(at=at, begun_s=begun, roles=found, done=done, watched=ground.watched, faults=faults)


@contextmanager
def attacking(kind: str, at: Round, ground: Ground, seconds: float) -> Iterator[subprocess.Popen[str]]:
    with ExitStack() as running:
        if kind in (ALONE, BUSY):
            computing = [running.enter_context(started(["-c", _COMPUTE])) for _ in range(BUSY_PROCESSES)]
            for process in computing if kind == ALONE else ():
                process.kill()
            yield running.enter_context(started(["-c", "print('{}')"]))
            return
        seed = Random(f"{at.seed} {at.number} {kind}").getrandbits(32)
        words = [kind, str(HOSTILE), str(seconds), str(seed), json.dumps(asdict(ground.place))]
        yield running.enter_context(started(["-m", "tests.hostile.user", *words]))


# ---- judging ----


@dataclass(frozen=True)
class Bounds:
    """Milliseconds that are too long."""

    acquire_ms: float = 2.0
    mark_ms: float = 50.0
    greeting_ms: float = 1000.0

    def beside(self, busy: Outcome) -> Bounds:
        """Bounds for this machine, by the times of the round with computing processes."""
        return Bounds(
            acquire_ms=max(self.acquire_ms, MORE_THAN_BUSY * p99(busy.values("loads", "acquires"))),
            mark_ms=max(self.mark_ms, MORE_THAN_BUSY * longest(busy.values("loads", "marks"))[1]),
            greeting_ms=max(self.greeting_ms, MORE_THAN_BUSY * longest(busy.values("newcomers", "greetings"))[1]),
        )


def p99(times: Iterable[tuple[float, float]]) -> float:
    found = [took for _, took in times]
    return float(np.percentile(found, 99)) if found else 0.0


def longest(times: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """When, and how long."""
    return max(times, key=lambda one: one[1], default=(0.0, 0.0))


def judge(found: Outcome, bounds: Bounds | None) -> list[Broken]:
    """Promises that were broken. Without bounds, times are not judged."""
    broken: list[Broken] = []

    def note(moment: float, promise: str, what: str) -> None:
        second = round(max(0.0, moment - found.begun_s), 1)
        broken.append(Broken(at=found.at, second=second, promise=promise, found=what))

    for role, said in found.roles.items():
        if said is None or not said["is_served"]:
            note(found.begun_s, SERVED, f"{role} is not")
        for name, promise in (("wrong", NOT_WRONG), ("lost", NOT_LOST)):
            if events := found.values(role, name):
                note(events[0][0], promise, f"{events[0][1]} ({len(events)} times)")
        if (events := found.values(role, "refused")) and not found.watched.ends:
            note(events[0][0], "the honest user is never refused", f"{role}, {len(events)} times: {events[0][1]}")
    watched = found.watched
    for moment, why in watched.ends:
        note(moment, LIVES, why)
    growth = watched.peak_bytes - watched.start_bytes
    if growth > GROWTH_BYTES:
        note(found.begun_s, IS_BOUNDED, f"it grew by {growth >> 20} MiB")
    if found.faults:
        note(found.begun_s, HAS_NO_FAULT, f"{found.faults} tracebacks in its log")
    if bounds is not None:
        judge_times(found, bounds, note)
    return broken


def judge_times(found: Outcome, bounds: Bounds, note: Any) -> None:
    for role, name, bound in (("loads", "marks", bounds.mark_ms), ("newcomers", "greetings", bounds.greeting_ms)):
        moment, took = longest(found.values(role, name))
        if took > bound:
            ran = [f", of which the loop ran {ms:.0f}" for begun, ms in found.values(role, "loops") if begun <= moment]
            what = f"{took:.0f} ms{ran[-1] if name == 'marks' and ran else ''}"
            note(moment, f"no wait of {name} is longer than {bound:.0f} ms", what)
    for what in ("page", "gate"):
        asked = [event for event in found.watched.asked if event[1].startswith(what)]
        refused = [event for event in asked if not event[1].endswith(": ")]
        if refused and not found.watched.ends:
            note(refused[0][0], f"the {what} answers", f"{len(refused)} of {len(asked)} times: {refused[0][1]}")
        moment, took = longest((begun, took) for begun, _, took in asked)
        if took > bounds.greeting_ms:
            note(moment, f"no wait at the {what} is longer than {bounds.greeting_ms:.0f} ms", f"{took:.0f} ms")


def sort_rounds(ended: Ended) -> dict[str, Ended]:
    """Returns the rounds of each kind of attack, of each store and of each limit."""
    rows: dict[str, list[tuple[Outcome, list[Broken]]]] = defaultdict(list)
    for found, broken in ended:
        for name in (*found.at.kinds, *filter(None, (found.at.setup.store, found.at.setup.limit))):
            rows[name].append((found, broken))
    return dict(rows)


def judge_acquires(ended: Ended, bounds: Bounds) -> list[Broken]:
    """Kinds of attack with which acquires took too long. One round has too few of them for a hundredth that says
    something. Each is reported with its worst round."""
    broken = []
    for name, those in sort_rounds(ended).items():
        took = p99(one for found, _ in those for one in found.values("loads", "acquires"))
        if name in (ALONE, BUSY) or took <= bounds.acquire_ms:
            continue
        worst = max((found for found, _ in those), key=lambda found: p99(found.values("loads", "acquires")))
        second = round(max(0.0, longest(worst.values("loads", "acquires"))[0] - worst.begun_s), 1)
        promise = f"acquires stay under {bounds.acquire_ms:.1f} ms at p99"
        what = f"{took:.1f} ms in all rounds with {name}"
        broken.append(Broken(at=worst.at, second=second, promise=promise, found=what))
    return broken


def run_campaign(seed: int, seconds: float, *, numbers: Sequence[int] = ()) -> Ended:
    """Runs rounds for so many seconds, or those of these numbers, and returns each outcome with what it broke."""
    end = time.monotonic() + seconds
    bounds = Bounds()
    ended: list[tuple[Outcome, list[Broken]]] = []
    for at in draw_rounds(seed):
        if numbers and at.number > max(numbers):
            break
        if numbers and at.number not in (0, 1, *numbers):
            continue
        if not numbers and time.monotonic() > end and at.number > 1:
            break
        print(f"seed {seed} round {at.number}: {', '.join(at.kinds)}; {describe(at.setup)}", flush=True)
        found = Outcome(at=at, begun_s=time.monotonic())
        try:
            found = run_round(at)
            if at.kinds == (BUSY,):
                bounds = bounds.beside(found)
            broken = judge(found, None if at.kinds[0] in (ALONE, BUSY) else bounds)
        except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as fault:
            broken = [Broken(at=at, second=0.0, promise=STARTS, found=str(fault)[:500])]
        for one in broken:
            print(f"  broken at {one.second} s: {one.promise}: {one.found}", flush=True)
        ended.append((found, broken))
    if ended:
        late = judge_acquires(ended, bounds)
        for one in late:
            print(f"broken: {one.promise}: {one.found}", flush=True)
        ended[-1][1].extend(late)
    return ended
