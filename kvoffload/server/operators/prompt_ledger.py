"""What became of the prompts that a domain's engines asked about, and why of what was missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvoffload.cache import Departed, Leaving, LocalCache
from kvoffload.protocol import Explanation, IdentityField, Miss, Query, Register, Reuse
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.limits import LINE_BYTES
from kvoffload.server.operators.agent_ledger import AgentLedger
from kvoffload.server.operators.counts import cut_text
from kvoffload.server.operators.distinct_blocks import DistinctBlocks
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Registration

STORED_SLACK_S = 2
"""A block that has been there for no longer may have been stored by the very prompt that lacked it."""
MAX_LOOKED_AT = 16
"""Other identities, the latest ones, in which a missing block is looked for."""
_OF_NAMES = frozenset({"hash_seed", "hash_algorithm", "salt"})
"""Whoever differs in these gives the same tokens other names."""
_LEFT = {
    Leaving.EVICTED: Miss.EVICTED,
    Leaving.UNTRUSTED: Miss.UNTRUSTED,
    Leaving.CLEARED: Miss.CLEARED,
}


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What was counted since the ledger was begun."""

    asked_blocks: int
    distinct_blocks: int
    saved_us: int


@dataclass(frozen=True)
class FoundBlock:
    """What memory remembers of a block."""

    stored_s: int | None = None
    departed: Departed | None = None


NOT_ASKED = FoundBlock()


def find_block(cache: LocalCache, name_space: int, query: Query) -> FoundBlock:
    """Returns what memory remembers of the missing block, on whatever thread."""
    (stored_s,) = cache.find_stored(name_space, query.group, query.missing)
    (departed,) = cache.find_departed(name_space, query.group, query.missing)
    return FoundBlock(stored_s, departed)


OnPrompt = Callable[[int, int, int, bytes], None]
"""Namespace, tokens of a block, tokens that were asked for, and tags of their blocks."""


class PromptLedger:
    """Counts what became of one domain's prompts. Belongs to the thread of the server's core."""

    def __init__(self, domain: Domain, on_prompt: OnPrompt | None = None) -> None:
        self._domain = domain
        self._on_prompt = on_prompt
        self._distinct = DistinctBlocks()
        self._asked_blocks = 0
        self._saved_us = 0
        self.tokens: Counter[str] = Counter()
        """By outcome: `hit_memory`, `hit_lower`, or why they were computed."""
        self.agents = AgentLedger()

    @property
    def counts(self) -> _Counts:
        return _Counts(asked_blocks=self._asked_blocks, distinct_blocks=self._distinct.count, saved_us=self._saved_us)

    def asks_memory(self, registration: Registration, query: Query) -> bool:
        """Says whether it is `find_block` that says why."""
        is_known = query.group < len(registration.register.groups)
        return query.miss is Miss.NEVER_SEEN and bool(query.missing) and self._domain.cache is not None and is_known

    def take(self, registration: Registration, query: Query, found: FoundBlock, *, owner: str = "") -> Explanation:
        """Counts what became of a prompt, and says why of what is missing; by what was found, where that says so."""
        tags = np.frombuffer(query.tags, "<u8")
        if len(tags):
            self._distinct.add(tags, space=registration.name_space)
            self._asked_blocks += len(tags)
            if self._on_prompt is not None:
                register = registration.register
                self._on_prompt(registration.name_space, register.hash_block_size, query.asked, query.tags)
        # Engines say what they like, and it has to fit an answer.
        self._saved_us = min(self._saved_us + query.saved_us, U64_MAX)
        if query.session:
            self.agents.take(query, f"tenant {registration.tenant}" if registration.tenant else owner)
        explanation = self._explain(registration, query, found)
        lower = min(query.lower, query.promised)
        self.tokens["hit_memory"] += query.promised - lower
        self.tokens["hit_lower"] += lower
        self.tokens[explanation.miss.name.lower()] += max(query.asked - query.promised, 0)
        return explanation

    def _explain(self, registration: Registration, query: Query, found: FoundBlock) -> Explanation:
        if not self.asks_memory(registration, query):
            return Explanation(miss=query.miss)
        if found.stored_s is not None and found.stored_s > query.age_ms / 1000 + STORED_SLACK_S:
            return Explanation(miss=Miss.INCOMPLETE)
        departed = found.departed
        if departed is not None:
            return Explanation(
                miss=_LEFT[departed.why], seconds_ago=departed.seconds_ago, missing_bytes=departed.missing_bytes
            )
        return self._look_elsewhere(registration, query)

    def _look_elsewhere(self, registration: Registration, query: Query) -> Explanation:
        """Looks for a block in what other engines have stored. Names only: nobody is given what is there."""
        cache = self._domain.cache
        assert cache is not None
        perhaps = ""
        others = [one for one in reversed(self._domain.fingerprints.items()) if one[0] != registration.name_space]
        for name_space, fingerprint in others[:MAX_LOOKED_AT]:
            register = self._domain.registers.get(fingerprint)
            if register is None:
                continue
            differing = find_differences(registration.register, register)
            if set(differing) <= _OF_NAMES:
                perhaps = perhaps or f"{', '.join(differing)} (the same tokens have other names there)"
                continue
            prefixes = [at for at, group in enumerate(register.groups) if group.reuse is Reuse.PREFIX]
            if cache.lookup(name_space, prefixes[0] if prefixes else 0, query.missing).all():
                differs = cut_text(", ".join(differing), LINE_BYTES)
                return Explanation(miss=Miss.OTHER_IDENTITY, differs=differs)
        return Explanation(miss=Miss.NEVER_SEEN, differs=perhaps)


def find_differences(ours: Register, theirs: Register) -> list[str]:
    """Names of what two identities differ in, as far as both were told; never values."""
    differing = {name for name in ("hash_algorithm", "hash_seed", "hash_block_size") if _differ(ours, theirs, name)}
    parts, other_parts = _parts(ours.identity), _parts(theirs.identity)
    differing |= {name for name in parts.keys() & other_parts.keys() if parts[name] != other_parts[name]}
    if ours.groups != theirs.groups and "geometry" not in differing:
        differing.add("groups")
    return sorted(differing) or ["fingerprint"]


def _differ(ours: Register, theirs: Register, name: str) -> bool:
    return bool(getattr(ours, name) != getattr(theirs, name))


def _parts(identity: tuple[IdentityField, ...]) -> dict[str, str]:
    return {part.name: part.value for part in identity}
