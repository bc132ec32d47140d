"""Counts what became of the prompts that a domain's engines asked about, and explains why blocks were missing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CacheGeometry, Departed, Leaving, LocalCache, needed_blocks
from kvoffload.protocol import Explanation, IdentityField, Miss, Query, Register
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.insight import TAG_BYTES
from kvoffload.protocol.limits import LINE_BYTES
from kvoffload.protocol.opening import find_model
from kvoffload.server.common.steps import Steps
from kvoffload.server.operators.distinct_blocks import DistinctBlocks
from kvoffload.server.operators.hit_window import HitSums, HitWindow
from kvoffload.server.operators.ledger import Ledger
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Registration
from kvoffload.server.tiering.counts import cut_text
from kvoffload.types import ReuseRule

logger = logging.getLogger(__name__)

PART_TAGS = 1024
"""Number of tags of a prompt above which counting them is a part of the work by itself."""
STORED_SLACK_S = 2
"""Seconds. A block that has been there for no longer may have been stored by the very prompt that lacked it."""
MAX_LOOKED_AT = 16
"""Number of other identities, the latest ones, in which a missing block is looked for."""
MAX_TOLD = 64
"""Number of lines that the log gets about engines that differ. No user can fill it with more."""
_OF_NAMES = frozenset({"hash_seed", "hash_algorithm", "salt"})
"""Parts of an identity that decide how tokens are named. Engines that differ in them give the same tokens other
names."""
_LEFT = {
    Leaving.EVICTED: Miss.EVICTED,
    Leaving.UNTRUSTED: Miss.UNTRUSTED,
    Leaving.CLEARED: Miss.CLEARED,
}


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Counts since the ledger was begun."""

    asked_blocks: int
    distinct_blocks: int
    saved_us: int


@dataclass(frozen=True)
class FoundBlock:
    """A block's history as memory remembers it: when it was stored, and how it left."""

    stored_s: int | None = None
    departed: Departed | None = None


NOT_ASKED = FoundBlock()


@dataclass(frozen=True, eq=False)
class FoundPrompts:
    """Facts about the prompts of one message."""

    blocks: Sequence[FoundBlock]
    """The history of the missing block of each."""
    read_bytes: Sequence[int]
    """The bytes of the blocks that each prompt got."""
    distinct: DistinctBlocks
    """All blocks that were asked for."""


def find_prompts(
    cache: LocalCache, name_space: int, geometry: CacheGeometry | None, queries: Sequence[Query], asks: Sequence[bool]
) -> Steps[FoundPrompts]:
    """Finds what the ledger needs to know, of those missing blocks that memory is asked about. From any thread."""
    distinct, found, read_bytes = DistinctBlocks(), list[FoundBlock](), list[int]()
    for query, is_asked in zip(queries, asks, strict=True):
        if query.tags:
            distinct.add(np.frombuffer(query.tags, "<u8"), space=name_space)
        found.append(_find_block(cache, name_space, query) if is_asked else NOT_ASKED)
        read_bytes.append(0 if geometry is None else _count_bytes(geometry, min(query.promised, query.asked)))
        if len(query.tags) > PART_TAGS * TAG_BYTES:
            yield
    return FoundPrompts(found, read_bytes, distinct)


def _find_block(cache: LocalCache, name_space: int, query: Query) -> FoundBlock:
    (stored_s,) = cache.find_stored(name_space, query.group, query.missing)
    (departed,) = cache.find_departed(name_space, query.group, query.missing)
    return FoundBlock(stored_s, departed)


def _count_bytes(geometry: CacheGeometry, tokens: int) -> int:
    """Returns the bytes of the blocks that a load of so many tokens brings."""
    return sum(
        len(needed_blocks(group.rule, local=0, boundary=tokens)) * group.record_bytes * group.shards
        for group in geometry.groups
    )


OnPrompt = Callable[[int, int, int, bytes], None]
"""Called with a namespace, the tokens of a block, the tokens that were asked for, and tags of their blocks."""


class PromptLedger:
    """Counts what became of one domain's prompts. Belongs to the thread of the server's core."""

    def __init__(self, domain: Domain, on_prompt: OnPrompt | None = None) -> None:
        self._domain = domain
        self._on_prompt = on_prompt
        self._distinct = DistinctBlocks()
        self._asked_blocks = 0
        self._saved_us = 0
        self._told: set[tuple[str, str]] = set()
        """Models, and the parts in which an engine of each differs from one that has stored its blocks: the log has a
        line about each pair."""
        self.tokens: Counter[str] = Counter()
        """Number of tokens by outcome: `hit_memory`, `hit_lower`, or why they were computed."""
        self.ledger = Ledger(domain)
        self.window = HitWindow()

    @property
    def counts(self) -> _Counts:
        return _Counts(asked_blocks=self._asked_blocks, distinct_blocks=self._distinct.count, saved_us=self._saved_us)

    def look(self, now_ns: int) -> bool:
        """Notes what was hit and would have been hit, for the window of the last day. Returns whether there is a memory
        that can be looked at."""
        if self._domain.cache is None:
            return False
        tokens = self.tokens
        prompts = HitSums(
            saved_us=self._saved_us,
            hit_memory=tokens["hit_memory"],
            hit_lower=tokens["hit_lower"],
            evicted=tokens[Miss.EVICTED.label],
        )
        self.window.look(now_ns, self._domain.cache.memory_curve, prompts)
        return True

    def asks_memory(self, registration: Registration, query: Query) -> bool:
        """Whether `find_block` has to find out why the prompt's block is missing."""
        is_known = query.group < len(registration.register.groups)
        return query.miss is Miss.NEVER_SEEN and bool(query.missing) and self._domain.cache is not None and is_known

    def take(
        self, registration: Registration, queries: Sequence[Query], found: FoundPrompts, *, owner: str = ""
    ) -> list[Explanation]:
        """Counts what became of prompts, and returns why a block of each is missing: by what was found, if that tells,
        else as the engine says."""
        self._distinct.merge(found.distinct)
        missing = [query.missing for query in queries if self.asks_memory(registration, query)]
        others = _Others(self._domain, registration, missing)
        return [
            self._take(registration, query, block, read_bytes, others, owner=owner)
            for query, block, read_bytes in zip(queries, found.blocks, found.read_bytes, strict=True)
        ]

    def _take(
        self,
        registration: Registration,
        query: Query,
        found: FoundBlock,
        read_bytes: int,
        others: _Others,
        *,
        owner: str,
    ) -> Explanation:
        if query.tags:
            self._asked_blocks += len(query.tags) // TAG_BYTES
            if self._on_prompt is not None:
                register = registration.register
                self._on_prompt(registration.name_space, register.hash_block_size, query.asked, query.tags)
        # Engines may send any number, and it has to fit an answer.
        self._saved_us = min(self._saved_us + query.saved_us, U64_MAX)
        self.ledger.take(registration, query, read_bytes, owner=owner)
        explanation = self._explain(registration, query, found, others)
        lower = min(query.lower, query.promised)
        self.tokens["hit_memory"] += query.promised - lower
        self.tokens["hit_lower"] += lower
        self.tokens[explanation.miss.label] += max(query.asked - query.promised, 0)
        return explanation

    def _explain(self, registration: Registration, query: Query, found: FoundBlock, others: _Others) -> Explanation:
        if not self.asks_memory(registration, query):
            return Explanation(miss=query.miss)
        if found.stored_s is not None and found.stored_s > query.age_ms / 1000 + STORED_SLACK_S:
            return Explanation(miss=Miss.INCOMPLETE)
        departed = found.departed
        if departed is not None:
            return Explanation(
                miss=_LEFT[departed.why], seconds_ago=departed.seconds_ago, missing_bytes=departed.missing_bytes
            )
        explanation = others.look(query)
        if explanation.miss is Miss.OTHER_IDENTITY:
            self._tell_other(registration, explanation.differs)
        return explanation

    def _tell_other(self, registration: Registration, differs: str) -> None:
        """Logs once for each model and list of parts that prompts are computed whose blocks another identity has."""
        model = find_model(registration.register.identity)
        if (model, differs) in self._told or len(self._told) >= MAX_TOLD:
            return
        self._told.add((model, differs))
        logger.warning(
            "an engine of %s computes prompts whose blocks are stored by an engine that differs in %s; "
            "`kvoffload inspect identities --diff` shows both values",
            model or "a model without a name",
            differs,
        )


class _Others:
    """The latest other identities of a domain, as one engine's message compares them with its own."""

    def __init__(self, domain: Domain, registration: Registration, missing: Sequence[bytes]) -> None:
        self._domain = domain
        self._registration = registration
        self._missing = missing
        """Names of the blocks that may be looked for."""
        self._places = {name: at for at, name in enumerate(missing)}

    def look(self, query: Query) -> Explanation:
        """Looks for a block among those that other engines have stored. It compares names only, and hands out no
        contents."""
        perhaps, place = "", self._places[query.missing]
        for differing, is_there in self._compared:
            if is_there is None:
                perhaps = perhaps or f"{', '.join(differing)} (the same tokens have other names there)"
            elif is_there[place]:
                differs = cut_text(", ".join(differing), LINE_BYTES)
                return Explanation(miss=Miss.OTHER_IDENTITY, differs=differs)
        return Explanation(miss=Miss.NEVER_SEEN, differs=perhaps)

    @cached_property
    def _compared(self) -> list[tuple[list[str], npt.NDArray[np.bool_] | None]]:
        """In what each differs, and which of the missing blocks are in its first group that keeps prefixes; None where
        the same tokens have other names."""
        domain, compared = self._domain, list[tuple[list[str], npt.NDArray[np.bool_] | None]]()
        assert domain.cache is not None
        names = b"".join(self._missing)
        others = (one for one in reversed(domain.fingerprints.items()) if one[0] != self._registration.name_space)
        for name_space, fingerprint in islice(others, MAX_LOOKED_AT):
            register = domain.registers.get(fingerprint)
            if register is not None:
                differing = find_differences(self._registration.register, register)
                group = next((at for at, one in enumerate(register.groups) if one.reuse is ReuseRule.PREFIX), 0)
                has_names = not set(differing) <= _OF_NAMES
                compared.append((differing, domain.cache.lookup(name_space, group, names) if has_names else None))
        return compared


def find_differences(ours: Register, theirs: Register) -> list[str]:
    """Returns the names of the parts in which two identities differ, as far as both were told; never their values."""
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
