"""Panels that are worth looking at: queries in Prometheus's language, and what each panel is for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

INTERVAL = "$__rate_interval"
"""Grafana's own: as many seconds as a rate needs here."""


class Shown(Enum):
    """How numbers are written, in Grafana's words."""

    SHARE = "percentunit"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "ops"
    SECONDS = "s"
    COUNT = "short"
    STATE = "bool_yes_no"


@dataclass(frozen=True)
class Query:
    """`legend` may name labels as {{label}}."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a dashboard."""

    title: str
    help: str
    shown: Shown
    queries: tuple[Query, ...]


@dataclass(frozen=True, kw_only=True)
class PanelRow:
    """Panels about one thing."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, *by: str) -> str:
    rate = f"rate({metric}[{INTERVAL}])"
    return f"sum by ({', '.join(by)}) ({rate})" if by else f"sum({rate})"


def _quantiles(metric: str, **of: str) -> tuple[Query, ...]:
    chosen = "{" + ", ".join(f'{label}="{value}"' for label, value in of.items()) + "}" if of else ""
    return tuple(
        Query(f"histogram_quantile({share}, {_rate(f'{metric}_bucket{chosen}', 'le')})", name)
        for share, name in ((0.5, "median"), (0.99, "p99"))
    )


_ENGINES = PanelRow(
    title="Engines",
    panels=(
        Panel(
            title="Prompt tokens that were not computed again",
            help="Share of the tokens that an engine did not have itself and that kvoffload had, by tier.",
            shown=Shown.SHARE,
            queries=(
                Query(
                    f"{_rate('kvoffload_hits_total', 'tier')} / ignoring(tier) group_left "
                    f"{_rate('kvoffload_queries_total')}",
                    "{{tier}}",
                ),
            ),
        ),
        Panel(
            title="Why the others were computed",
            help="Tokens a second. never_seen is new work; anything else can be changed: see docs/monitoring.md.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_misses_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            title="Moved",
            help="Bytes copied between the engines' KV caches and memory.",
            shown=Shown.BYTES_PER_SECOND,
            queries=(
                Query(_rate("kvoffload_loaded_bytes_total"), "loaded"),
                Query(_rate("kvoffload_saved_bytes_total"), "saved"),
            ),
        ),
        Panel(
            title="Speed of a load",
            help="Bytes a second, from the load's planning until every byte is in the engine's KV cache.",
            shown=Shown.BYTES_PER_SECOND,
            queries=_quantiles("kvoffload_load_bytes_per_second"),
        ),
        Panel(
            title="Time of a load",
            help="Time until every byte is in the engine's KV cache. A request waits for it.",
            shown=Shown.SECONDS,
            queries=_quantiles("kvoffload_load_seconds"),
        ),
        Panel(
            title="What went wrong",
            help="Should be nothing. A load that fails is computed, a save that fails is not there.",
            shown=Shown.PER_SECOND,
            queries=(
                Query(_rate("kvoffload_failed_loads_total"), "loads"),
                Query(_rate("kvoffload_failed_saves_total"), "saves"),
                Query(_rate("kvoffload_faults_total", "hook"), "fault in {{hook}}"),
                Query(_rate("kvoffload_errors_total", "code"), "{{code}}"),
            ),
        ),
        Panel(
            title="Blocks that were not saved",
            help="no_slot: memory is too small, or full of leased blocks. no_pin: saves are slower than prompts.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_dropped_saves_total", "reason"), "{{reason}}"),),
        ),
    ),
)
_PROMPTS = PanelRow(
    title="Prompts, as the server sees them",
    panels=(
        Panel(
            title="What became of their tokens",
            help="evicted: more memory would have kept them. other_identity: an engine that differs has them.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_prompt_tokens_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            title="How much could hit at most",
            help="Share of the requested blocks that had been requested before: an endless cache would have had them.",
            shown=Shown.SHARE,
            queries=(Query("kvoffload_hit_ceiling_ratio", "ceiling"),),
        ),
        Panel(
            title="Hits with less and more memory",
            help="Share of the blocks that engines loaded, or computed and saved, that a pool of so many times this "
            "one's memory would have had.",
            shown=Shown.SHARE,
            queries=(Query("kvoffload_memory_hit_ratio", "{{memory}} x"),),
        ),
        Panel(
            title="What other memory would have saved",
            help="Prefill that a pool of so many times this one's memory would have saved more in the last day. Below "
            "0: less.",
            shown=Shown.SECONDS,
            queries=(Query("kvoffload_memory_worth_seconds", "{{memory}} x"),),
        ),
        Panel(
            title="What that is worth",
            help="The same in money, less the price of the memory. Needs the settings computing_price and "
            "memory_price.",
            shown=Shown.COUNT,
            queries=(Query("kvoffload_memory_worth_price", "{{memory}} x"),),
        ),
        Panel(
            title="Blocks that were asked for",
            help="Blocks of prompts that engines did not have themselves.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_asked_blocks_total"), "asked for"),),
        ),
        Panel(
            title="Different blocks",
            help="Different blocks among those that were asked for. A memory that holds all of them misses no block "
            "twice.",
            shown=Shown.COUNT,
            queries=(Query("kvoffload_distinct_blocks", "different"),),
        ),
        Panel(
            title="Computing that was saved",
            help="Seconds of engines, in each second: 2 is as much as two engines compute.",
            shown=Shown.COUNT,
            queries=(Query(_rate("kvoffload_engines_saved_seconds_total"), "engines"),),
        ),
        Panel(
            title="How long blocks stay",
            help="Time from storing to eviction of the blocks that were evicted.",
            shown=Shown.SECONDS,
            queries=_quantiles("kvoffload_residence_seconds"),
        ),
        Panel(
            title="Blocks that were never loaded",
            help="Evicted blocks that were never loaded.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_evicted_unused_blocks_total"), "never loaded"),),
        ),
    ),
)
_CALLS = PanelRow(
    title="The server's calls",
    panels=(
        Panel(
            title="An acquire",
            help="Time on the server. An engine waits for it.",
            shown=Shown.SECONDS,
            queries=_quantiles("kvoffload_call_seconds", call="acquire"),
        ),
        Panel(
            title="Waiting for a tier",
            help="Time that requests waited for blocks that a slower tier promoted.",
            shown=Shown.SECONDS,
            queries=_quantiles("kvoffload_promotion_seconds"),
        ),
        Panel(
            title="Errors that were answered",
            help="Errors by code, see docs/protocol.md.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_answered_errors_total", "code"), "{{code}}"),),
        ),
    ),
)
_MEMORY = PanelRow(
    title="The server's memory",
    panels=(
        Panel(
            title="Questions",
            help="Requests for a prompt's blocks, by their outcome.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_acquires_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            title="Full",
            help="Used share of memory and of each slower tier. A cache is full most of the time. Memory grows at "
            "first.",
            shown=Shown.SHARE,
            queries=(
                Query("kvoffload_used_bytes / (kvoffload_capacity_bytes > 0)", "{{tier}} {{place}}"),
                Query(
                    'kvoffload_memory_ready_bytes / (kvoffload_capacity_bytes{tier="memory"} > 0)',
                    "memory that is there",
                ),
            ),
        ),
        Panel(
            title="Blocks that made room",
            help="Blocks that were evicted and not written to a slower tier (compare with that row) are computed "
            "again.",
            shown=Shown.PER_SECOND,
            queries=(
                Query(_rate("kvoffload_evicted_blocks_total"), "made room"),
                Query(_rate("kvoffload_duplicate_blocks_total"), "saved twice"),
            ),
        ),
        Panel(
            title="By tenant",
            help="Memory of each tenant's blocks.",
            shown=Shown.BYTES,
            queries=(Query("kvoffload_tenant_used_bytes", "{{tenant}}"),),
        ),
        Panel(
            title="Computing saved",
            help="Seconds of computing that each tenant and each model saved in a second.",
            shown=Shown.COUNT,
            queries=(Query(_rate("kvoffload_ledger_saved_seconds_total", "by", "account"), "{{by}} {{account}}"),),
        ),
        Panel(
            title="Held",
            help="Blocks and slots that cannot be evicted now. They get fewer when engines have loaded and saved; if "
            "not, one hangs.",
            shown=Shown.COUNT,
            queries=(
                Query("kvoffload_open_leases", "leases"),
                Query("kvoffload_reserved_slots", "slots being written"),
                Query("kvoffload_quarantined_blocks", "bad blocks that are leased"),
            ),
        ),
        Panel(
            title="Blocks, identities, processes",
            help="Blocks that can be read, and the engines that share them.",
            shown=Shown.COUNT,
            queries=(
                Query("kvoffload_entries", "blocks in {{tier}} {{place}}"),
                Query("kvoffload_namespaces", "identities"),
                Query("kvoffload_sessions", "processes"),
            ),
        ),
    ),
)
_TIERS = PanelRow(
    title="Below memory",
    panels=(
        Panel(
            title="Moved",
            help="Up: blocks for requests that wait. Down: blocks that were stored, or are about to be evicted.",
            shown=Shown.BYTES_PER_SECOND,
            queries=(
                Query(_rate("kvoffload_tier_promoted_bytes_total", "tier"), "{{tier}}, up"),
                Query(_rate("kvoffload_tier_written_bytes_total", "tier"), "{{tier}}, down"),
            ),
        ),
        Panel(
            title="Places that can be used",
            help="A folder or a store that is away is a miss, and is looked for in the background.",
            shown=Shown.STATE,
            queries=(Query("kvoffload_tier_ready", "{{tier}} {{place}}"),),
        ),
        Panel(
            title="Requests that did not get all",
            help="late: not in the time that a request gives. too_slow: computing was estimated to be faster.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_tier_unserved_requests_total", "tier", "reason"), "{{tier}}, {{reason}}"),),
        ),
        Panel(
            title="Blocks that were not written",
            help="full: the tier is slower than engines save.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_tier_dropped_blocks_total", "tier", "reason"), "{{tier}}, {{reason}}"),),
        ),
        Panel(
            title="Coded",
            help="Records that became shorter by a code when they were written: as they are in memory, and as written.",
            shown=Shown.BYTES_PER_SECOND,
            queries=(
                Query(_rate("kvoffload_tier_coded_bytes_total", "tier"), "{{tier}}, in memory"),
                Query(_rate("kvoffload_tier_coded_stored_bytes_total", "tier"), "{{tier}}, as written"),
            ),
        ),
        Panel(
            title="Waiting",
            help="Bytes that wait to be written.",
            shown=Shown.BYTES,
            queries=(Query("kvoffload_tier_waiting_bytes", "{{tier}}"),),
        ),
        Panel(
            title="Bad bytes",
            help="Should be nothing: records whose bytes are not what their digest says. They were not served.",
            shown=Shown.PER_SECOND,
            queries=(
                Query(_rate("kvoffload_mismatches_total"), "memory"),
                Query(_rate("kvoffload_tier_quarantined_records_total", "tier"), "{{tier}}"),
            ),
        ),
    ),
)
_HINTS = PanelRow(
    title="Hints of routers and agents",
    panels=(
        Panel(
            title="What became of their tokens",
            help="hit: loaded since. unused: not loaded in time. gave_way: let go before their time, for others' room.",
            shown=Shown.PER_SECOND,
            queries=(Query(_rate("kvoffload_hint_tokens_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            title="What was done",
            help="over_limit: more would be retained or promoted than may be.",
            shown=Shown.PER_SECOND,
            queries=(
                Query(_rate("kvoffload_hint_requests_total", "action", "outcome"), "{{action}}, {{outcome}}"),
                Query(_rate("kvoffload_hint_ignored_total", "reason"), "ignored: {{reason}}"),
            ),
        ),
        Panel(
            title="Retained",
            help="Memory that is kept from eviction; each prefix counts all its blocks.",
            shown=Shown.BYTES,
            queries=(
                Query("kvoffload_hint_retained_bytes", "retained"),
                Query("kvoffload_hint_retained_limit_bytes", "may be"),
            ),
        ),
    ),
)
PANEL_ROWS = (_ENGINES, _PROMPTS, _MEMORY, _TIERS, _HINTS, _CALLS)
