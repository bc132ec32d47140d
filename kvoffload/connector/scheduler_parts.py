"""The parts with which the scheduler side decides, assembled from what the ranks of an engine registered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from kvoffload.client import Heard
from kvoffload.connector.common.block_chain import NO_MASK
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.step_plan import GroupFacts, Place, WorkerFacts
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine.events import CacheEvents
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.engine.traces import open_traces
from kvoffload.connector.engine.vllm_compat import GroupKind
from kvoffload.connector.hints.request_hints import RequestHints
from kvoffload.connector.identity.agreement import EngineFacts, Rank, SharingSettings, agree, make_register, name_node
from kvoffload.connector.loads.judge import LoadJudge
from kvoffload.connector.loads.prompt_notes import PromptNotes
from kvoffload.connector.loads.restores import Restores, RestoreSettings
from kvoffload.connector.loads.step_times import StepTimes
from kvoffload.connector.nodes.all_nodes import AllNodes
from kvoffload.connector.nodes.other_node import OtherNode
from kvoffload.connector.saves.eviction_watch import Auto, EvictionWatch
from kvoffload.connector.saves.look_out import ROUND_STEPS, LookOut
from kvoffload.connector.saves.pins import BlockPins
from kvoffload.connector.saves.policy import Eager, PolicyName, SavePolicy, SecondUse, choose_policy
from kvoffload.connector.saves.saves import Saves
from kvoffload.connector.saves.settings import SaveSettings
from kvoffload.connector.saves.worth import GATHERED_TOKENS, SaveWorth
from kvoffload.protocol import Register

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger(__name__)

PIN_SHARE, MOST_PIN_SHARE = 8, 4
"""At most one block in `PIN_SHARE` is pinned for saving, and one in `MOST_PIN_SHARE` if saves need more; but always one
of each group, since a hit needs all groups."""
SAVING_STEPS = 2
"""Number of steps from the plan of a save to its end, for each step that is under way."""
STEPS_AHEAD = 4
"""Number of future steps whose blocks are watched in the engine's free queue: twice as many as a save takes."""

SEEN_PER_BLOCK = 8
"""Number of seen blocks that `second_use` remembers, for each block that the engine has room for."""

OpenCache = Callable[[Register, EngineFacts, Callable[[Heard, int], None] | None], CacheClient]
"""Opens the cache. Takes the registration, the ranks' facts, and the callback for the server's events, if any."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """The scheduler side's settings, from the user's and from the engine's configuration."""

    sharing: SharingSettings
    hit_alignment: int
    verify_always: bool = False
    load_always: bool = False
    promote_wait_s: float = 0.0
    arrival_wait_s: float = 0.0
    saves: bool = True
    """Whether the engine saves what it computes."""
    hands_over: bool = False
    """Whether the engine computes prompts for others, which are told what to expect."""
    save_policy: PolicyName = "auto"
    traces_endpoint: str | None = None
    """The address to which the engine sends its traces; None: nowhere."""
    event_kinds: tuple[GroupKind, ...] | None = None
    """Kinds of the engine's block tables, for events about cached blocks; None: events are not wanted."""
    events_again_s: float = 0.0
    """Seconds between events that repeat the whole inventory; 0: they never do."""
    has_prefix_cache: bool = True
    """Whether the engine has a prefix cache of its own."""
    whole_prompts: bool = False
    drops_last_block: bool = False
    """Whether the engine drops the last block of its own hits: see `vllm_compat.drops_last_block`."""
    replayed_tokens: int = 0
    """Number of tokens before the end of each hit that the engine computes again: see `vllm_compat.replayed_tokens`."""
    step_tokens: int = 8192
    """Maximum number of tokens that all requests together gain in a step."""
    max_requests: int = 256
    """Maximum number of requests that run at a time."""
    steps_under_way: int = 1
    by_priority: bool = False
    """Whether the engine preempts requests by their priority: see `vllm_compat.preempts_by_priority`."""
    decoded_tokens: int = 1
    """Maximum number of tokens that a request gains in a step once its prompt is computed."""
    round_steps: int = ROUND_STEPS
    gathered_tokens: int = GATHERED_TOKENS
    retention_interval: int | None = 0
    """Number of tokens between the boundaries whose windows the engine retains; 0: none at intervals, None: all."""


class RankPlaces:
    """The places where every rank of the engine may copy: hits are reported and slots used only there.

    Owned by the scheduler's thread.
    """

    def __init__(self, ranks: int, *, nodes: AllNodes | None = None, node_ranks: int = 0) -> None:
        """Takes the number of ranks; with several nodes, also the nodes, and the number of ranks on each."""
        self._ranks = ranks
        self._nodes = nodes
        self._node_ranks = node_ranks or ranks
        self._by_rank: dict[int, tuple[Place, ...]] = {}
        self._by_node: list[frozenset[Place]] = []
        self._everywhere: frozenset[Place] = frozenset()
        """The places where all ranks of the first node may copy; without several nodes these are all ranks."""

    def note(self, places: Mapping[int, Sequence[Place]]) -> None:
        """Takes the places of some ranks: for each of them all places where it may copy now."""
        if not places:
            return
        self._by_rank.update({rank: tuple(Place(*place) for place in mine) for rank, mine in places.items()})
        if len(self._by_rank) == self._ranks:
            ranks = [frozenset(mine) for _, mine in sorted(self._by_rank.items())]
            firsts = range(0, self._ranks, self._node_ranks)
            self._by_node = [frozenset.intersection(*ranks[at : at + self._node_ranks]) for at in firsts]
            self._everywhere = self._by_node[0]

    @property
    def are_all_known(self) -> bool:
        """Whether every rank has said that it may copy somewhere."""
        return len(self._by_rank) == self._ranks and all(self._by_rank.values())

    def has_all(self, place: Place) -> bool:
        return place in self._everywhere

    def have_all_nodes(self, place: Place) -> bool:
        """Whether every node has a place that belongs to this one, and all ranks of the node may copy there."""
        places = () if self._nodes is None else self._nodes.find_places(place.memory_id)
        return len(places) == len(self._by_node) > 0 and all(map(frozenset.__contains__, self._by_node, places))


class FormerMemories:
    """The memories of former servers that jobs still use: the workers unmap each once no job does. Owned by the
    scheduler's thread."""

    def __init__(self, cache: CacheClient, saves: Saves, restores: Restores) -> None:
        self._cache, self._saves, self._restores = cache, saves, restores
        self._current = cache.memory_id
        self._former: set[int] = set()

    def take_retired(self) -> tuple[int, ...]:
        """Returns the memories of former servers that no job uses any more, each once."""
        current = self._cache.memory_id
        if current != self._current:
            self._former |= {self._current} - {0}
            self._former -= {current}
            self._current = current
        if not self._former:
            return ()
        retired = self._former - self._saves.memories - self._restores.memories
        self._former -= retired
        return tuple(retired)


@dataclass(frozen=True)
class SchedulerParts:
    """The parts of the scheduler side, which exist once the workers have told what they registered."""

    cache: CacheClient
    groups: GroupTable
    worth: SaveWorth
    judge: LoadJudge
    times: StepTimes
    restores: Restores
    saves: Saves
    memories: FormerMemories
    pins: BlockPins
    places: RankPlaces
    policy: SavePolicy
    hints: RequestHints
    events: CacheEvents | None
    nodes: AllNodes | None
    """The same object as `cache` if the engine's ranks are on several machines, else None."""

    def let_go(self) -> None:
        """Drops the saves and answers that are under way."""
        self.saves.drop_all()
        self.restores.drop_answers()
        self.hints.let_go()

    def close(self) -> None:
        """Closes the cache: afterwards nothing asks it, and it reports no more events."""
        self.restores.notes.close()
        self.cache.close()
        if self.events is not None:
            self.events.close()


def assemble(
    facts: Mapping[Rank, WorkerFacts],
    settings: SchedulerSettings,
    *,
    pool: BlockPool,
    open_cache: OpenCache,
    measures: Measures,
    clock: Callable[[], float],
    is_known: Callable[[TrackedRequest], bool] = lambda tracked: True,
    find_mask: Callable[[], bytes] = lambda: NO_MASK,
) -> SchedulerParts:
    """Puts the parts together; `Saves` asks `is_known`, and `CacheEvents` asks `find_mask`. Raises if ranks disagree,
    and if the cache cannot be opened."""
    sharing = settings.sharing
    engine = agree(facts, sharing)
    groups = GroupTable(
        engine.groups,
        hash_block_size=sharing.hash_block_size,
        alignment=settings.hit_alignment,
        whole_prompts=settings.whole_prompts,
        drops_last_block=settings.drops_last_block,
        shards=[sharing.shards_of(group) for group in engine.groups],
    )
    fingerprint = name_node(engine.fingerprint, 0, sharing.nodes)
    register = make_register(fingerprint, engine.groups, sharing, description=engine.description)
    events = None
    if settings.event_kinds is not None:
        events = CacheEvents(
            fingerprint, groups, kinds=settings.event_kinds, find_mask=find_mask, again_s=settings.events_again_s
        )
    cache = open_cache(register, engine, None if events is None else events.hear)
    if events is not None:
        events.start(cache.take_inventory)
    nodes = _join_nodes(cache, facts, engine.groups, sharing, clock) if sharing.nodes > 1 else None
    cache = nodes or cache
    places = RankPlaces(sharing.ranks, nodes=nodes, node_ranks=sharing.node_ranks)
    is_ready = places.has_all if nodes is None else places.have_all_nodes
    places.note({rank.rank: rank.places for rank in facts.values()})
    worth = SaveWorth(groups, interval=settings.retention_interval, gathered_tokens=settings.gathered_tokens)
    pins = BlockPins(pool, limit=_limit_pins(settings, groups, engine.num_blocks))
    policy = _make_policy(settings, groups, pool, engine, cache)
    saves = Saves(
        cache,
        groups,
        worth,
        pins=pins,
        settings=SaveSettings(fingerprint=engine.fingerprint, sharing=sharing, node_bytes=engine.node_bytes),
        policy=policy,
        is_ready=is_ready,
        is_known=is_known,
        note_saved=None if events is None else events.note_tokens,
        look_out=LookOut(
            decoded_tokens=settings.decoded_tokens, round_steps=_find_round_steps(settings, groups, worth)
        ),
        measures=measures,
        clock=clock,
    )
    judge = LoadJudge()
    restores = Restores(
        cache,
        groups,
        pool=pool,
        settings=RestoreSettings(
            verify_always=settings.verify_always,
            always=settings.load_always,
            promote_wait_s=settings.promote_wait_s,
            arrival_wait_s=settings.arrival_wait_s,
            replayed_tokens=settings.replayed_tokens,
            # vLLM lets one request in a step begin from a state that it has, so waiting for it would take longer.
            shares_loads=settings.has_prefix_cache and not groups.with_states,
        ),
        judge=judge,
        notes=PromptNotes(cache, judge, measures, open_traces(settings.traces_endpoint), clock),
        is_ready=is_ready,
        measures=measures,
        clock=clock,
    )
    hints = RequestHints(cache, groups, measures=measures, clock=clock)
    times = StepTimes(judge, decoded_tokens=settings.decoded_tokens, clock=clock)
    memories = FormerMemories(cache, saves, restores)
    return SchedulerParts(
        cache, groups, worth, judge, times, restores, saves, memories, pins, places, policy, hints, events, nodes
    )


def _join_nodes(
    own: CacheClient,
    facts: Mapping[Rank, WorkerFacts],
    groups: Sequence[GroupFacts],
    sharing: SharingSettings,
    clock: Callable[[], float],
) -> AllNodes:
    """Joins this node's client, and what the lowest ranks of the other nodes have reported, to one cache."""
    others = [OtherNode(groups=len(groups), clock=clock) for _ in range(sharing.nodes - 1)]
    nodes = AllNodes(
        own,
        others,
        hash_block_size=sharing.hash_block_size,
        node_shards=sharing.count_node_rows(groups),
        clock=clock,
    )
    nodes.hear({sharing.node_of(one.rank): one.node_report for one in facts.values() if one.node_report is not None})
    return nodes


def _blocks_a_step(settings: SchedulerSettings, groups: GroupTable) -> int:
    """Returns the maximum number of blocks that all requests of a step can take from the engine's pool."""
    return sum(ceil(settings.step_tokens / rule.block_size) + settings.max_requests for rule in groups.table_rules)


def _find_round_steps(settings: SchedulerSettings, groups: GroupTable, worth: SaveWorth) -> int:
    """Returns the steps from one look at decoding requests to the next. If their windows are saved at intervals, it is
    looked before the engine drops a block of one."""
    if not worth.interval:
        return settings.round_steps
    return max(min(settings.round_steps, (groups.spare_tokens + 1) // settings.decoded_tokens), 1)


def _limit_pins(settings: SchedulerSettings, groups: GroupTable, num_blocks: int) -> int:
    """Returns one block in eight, or up to one in four if a save's steps fill more; at least one of each group."""
    wanted = SAVING_STEPS * settings.steps_under_way * _blocks_a_step(settings, groups)
    return max(len(groups.of_table), num_blocks // PIN_SHARE, min(wanted, num_blocks // MOST_PIN_SHARE))


def _make_policy(
    settings: SchedulerSettings, groups: GroupTable, pool: BlockPool, engine: EngineFacts, cache: CacheClient
) -> SavePolicy:
    wish = "auto" if settings.hands_over else settings.save_policy if settings.saves else "eager"
    name = choose_policy(wish, has_prefix_cache=settings.has_prefix_cache)
    if name == "second_use":
        return SecondUse(limit=max(SEEN_PER_BLOCK * engine.num_blocks, 2))
    if name == "eager":
        return Eager()
    look_ahead = min(STEPS_AHEAD * settings.steps_under_way * _blocks_a_step(settings, groups), engine.num_blocks)
    if name == "on_evict":
        return EvictionWatch(pool, groups, look_ahead=look_ahead)
    # Another engine waits for a producer's blocks, so they are saved at once even if that displaces others.
    return Auto(pool, groups, look_ahead=look_ahead, has_room=lambda: settings.hands_over or cache.has_room)
