"""Labels of the page and of `kvoffload top` for each thing that is shown, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    words: str
    meaning: str


OUTCOMES: Mapping[str, Label] = {
    "hit_memory": Label("from memory", "Restored from the server's memory."),
    "hit_lower": Label("from slower tiers", "Restored from a disk, a store or a peer."),
    "never_seen": Label("never seen", "Computed: no request had these tokens before, as far as the server remembers."),
    "evicted": Label(
        "evicted", "Computed: the block was there and was evicted. More memory or a disk would have kept it."
    ),
    "untrusted": Label("damaged", "Computed: the block's bytes had changed since it was saved, so it was dropped."),
    "cleared": Label("cleared", "Computed: an operator cleared the memory."),
    "other_identity": Label("other identity", "Computed: an engine with another model, dtype or setting has it."),
    "incomplete": Label("incomplete", "Computed: a window, a state or another group was missing for a hit there."),
    "too_short": Label("too short", "Computed: less than a whole block was shared with an earlier prompt."),
    "not_served": Label("no server", "Computed: the engine had no server at that moment."),
    "refused": Label("refused", "Computed: the server had no room for a lease."),
    "slow_to_answer": Label("answer too late", "Computed: the server did not answer in time."),
    "no_room": Label("no room in the engine", "Computed: the engine had no room for the whole prompt."),
    "slower_than_computing": Label("slower than computing", "Computed: loading it was estimated to take longer."),
    "tier_too_slow": Label("tier too slow", "Computed: a slower tier would not have brought it in time."),
    "skipped": Label("not wanted", "Computed: the request or its engine wanted no restores."),
    "other": Label("other reasons", "Computed for reasons that are less frequent; the table has each."),
}
SMALLER: Mapping[str, Label] = {
    "growing": Label("it grows", "The pool is served from its beginning on, and takes its memory step by step."),
    "former": Label("engines still have a former server's", "It grows when engines have let go of former memory."),
    "not_free": Label(
        "the machine has no more free", "It grows when the machine and its cgroups have more memory free."
    ),
    "cgroup": Label(
        "its cgroup got short of memory", "Memory of the cgroup got short, so part of the pool was given back."
    ),
    "machine": Label("the machine got short of memory", "Memory of the machine got short, so part was given back."),
    "stalls": Label("processes waited for memory", "Processes had to wait for memory, so part was given back."),
}
"""Reasons why a pool is smaller than its full size."""
CALLS: Mapping[str, Label] = {
    "call acquire": Label(
        "find and lease a prefix", "Finds the longest cached prefix of a prompt, and leases it for a load."
    ),
    "call acquire_entries": Label("lease named blocks", "Leases blocks that the engine names, for a load."),
    "call credits": Label("hand out slots", "Gives an engine slots that it holds ready for its saves."),
    "call publish": Label("publish saved blocks", "Makes written blocks readable for all engines."),
    "call abort": Label("give back slots", "Gives back slots that were not written."),
    "call release": Label("release leases", "Ends leases whose loads have ended."),
    "call invalidate": Label("forget blocks", "Drops blocks whose bytes must not be used any more."),
    "promotion": Label("wait for", "How long requests waited for blocks that a slower tier promoted to memory."),
    "residence": Label("time in memory", "How long evicted blocks had been in memory."),
}
SHOWN: Mapping[str, Label] = {
    "hit_rate": Label("prompt tokens restored", "Share of the prompt tokens that engines did not have themselves."),
    "hit_ceiling": Label(
        "with endless memory", "Share of the blocks asked for that had been asked for before: no cache could hit more."
    ),
    "memory": Label("memory in use", "Memory that blocks take on the server. Full memory is normal."),
    "saved_seconds": Label(
        "computing saved",
        "Time in which the engines would have computed the restored tokens, at the speed that they have measured.",
    ),
    "blocks": Label("blocks in memory", "Number of blocks in memory, of all models and groups."),
    "evicted": Label("made room", "Blocks that were evicted to make room for others, so far."),
    "leases": Label("leases", "Loads under way: their blocks cannot be evicted."),
    "reserved": Label("slots held ready", "Room that engines hold for their next saves, or are writing to."),
    "settings": Label(
        "settings that differ",
        "These engines have the same weights. Started with the same settings, they would restore each other's blocks.",
    ),
    "sessions": Label("processes", "Number of processes of engines and of observers that have joined."),
    "namespaces": Label("identities", "Kinds of engines that may share blocks: model, dtypes, layouts, kernels."),
    "tokens": Label("tokens", "Prompt tokens, since the server began."),
    "share": Label("share", "Share of all prompt tokens that engines did not have themselves."),
    "used": Label("in use", "Bytes that records take in this tier."),
    "written": Label("written", "Bytes written to this tier since the server began."),
    "read": Label("read", "Bytes read from this tier since the server began."),
    "reads_now": Label("reads now", "Bytes read from this tier in each second."),
    "can_read": Label("measured speed", "How fast it has read; requests wait for it only where that pays."),
    "load": Label("load", "Reads now, of the measured speed."),
    "to_write": Label(
        "to be written", "Bytes that wait to be written to this tier. Blocks that find its queue full are not written."
    ),
    "waiting": Label("requests waiting", "Requests that wait for blocks that this tier is promoting to memory."),
    "late": Label("late", "Requests that the tier did not serve in time; they computed."),
    "part": Label("of memory", "Its share of the server's memory."),
    "quota": Label("quota", "Memory that this tenant keeps when memory is full."),
    "of_quota": Label("of quota", "Memory in use, of the quota; of all memory where there is none."),
    "calls": Label("calls", "Since the server began."),
    "mean": Label("mean", "Time that the server took."),
    "p99": Label("99 % within", "All but one of a hundred took no longer."),
    "times_memory": Label("memory", "Size of a pool like this one: 0.5 x has half of its memory."),
    "would_hit": Label(
        "would be hits", "Share of the blocks that engines loaded, or computed and saved. Older ones count less."
    ),
    "would_bring": Label(
        "in the last day",
        "Computed from a sample of the blocks. The figure in brackets says how sure that is, in 19 of 20 cases.",
    ),
    "saver": Label("tenant", "Those that saved the most, and the rest of them."),
    "saved": Label("prefill saved", "Time in which engines would have computed the restored tokens."),
    "restored": Label("restored", "Share of the prompt tokens that engines did not have themselves."),
    "times": Label("times", "Since the server began."),
}


def describe_labels() -> dict[str, dict[str, list[str]]]:
    """Describes labels for the page, as words and meaning."""
    sections = {"outcomes": OUTCOMES, "calls": CALLS, "shown": SHOWN}
    return {
        section: {name: [one.words, one.meaning] for name, one in labels.items()}
        for section, labels in sections.items()
    }
